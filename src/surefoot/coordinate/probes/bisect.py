"""Which links between nodes are bad, by halving: pure, with the measurement handed in.

Pairs are measured in rounds in which every node takes part at most once (a tournament), so no pair disturbs another. A set of links that is
fast together has no bad one; one that is slow is split in halves, until single links are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

Pair = tuple[str, str]
IsFast = Callable[[tuple[Pair, ...]], bool]
"""Whether all links of a set are fast when they are measured together."""


@dataclass(frozen=True, slots=True)
class BadLinks:
    """`links` are slow by themselves. A node that stands at most of its own links being bad is named instead of them, in `nodes`."""

    links: tuple[Pair, ...]
    nodes: tuple[str, ...]
    num_measured: int


def find_bad_links(nodes: Sequence[str], is_fast: IsFast, *, max_measured: int = 10_000) -> BadLinks:
    """Halves the set of links until those that are slow alone are left; about 2 log2(links) measurements for a single one.

    Raises ValueError after `max_measured` of them: so many bad links are no case for a search.
    """
    pending: list[tuple[Pair, ...]] = [tuple(combinations(nodes, 2))] if len(nodes) > 1 else []
    bad: list[Pair] = []
    num_measured = 0
    while pending:
        links = pending.pop()
        if num_measured >= max_measured:
            raise ValueError(f"{num_measured} measurements found {len(bad)} bad links and no end: measure every pair instead")
        num_measured += 1
        if is_fast(links):
            continue
        if len(links) == 1:
            bad.append(links[0])
            continue
        middle = len(links) // 2
        pending += [links[middle:], links[:middle]]
    return _named(nodes, tuple(bad), num_measured=num_measured)


def rounds(nodes: Sequence[str]) -> Iterator[tuple[Pair, ...]]:
    """Every pair once, in rounds where each node is in at most one: the circle method, len(nodes) - 1 rounds, one more for odd numbers."""
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        yield tuple((a, b) for a, b in zip(circle[:half], reversed(circle[half:]), strict=True) if a is not None and b is not None)
        circle = [circle[0], circle[-1], *circle[1:-1]]


def slow_pairs(bytes_per_s: dict[Pair, float], *, share: float) -> tuple[Pair, ...]:
    """The pairs below `share` of the median: with few bad links the median is that of a good one."""
    if not bytes_per_s:
        return ()
    usual = median(bytes_per_s.values())
    return tuple(pair for pair, speed in sorted(bytes_per_s.items()) if speed < share * usual)


def _named(nodes: Sequence[str], bad: tuple[Pair, ...], *, num_measured: int) -> BadLinks:
    """More than half of a node's links being bad says that the node is: two of three, since of two nodes neither can be told."""
    blamed = [node for node in nodes if len(nodes) > 2 and 2 * sum(node in pair for pair in bad) > len(nodes) - 1]
    return BadLinks(tuple(pair for pair in sorted(bad) if not set(pair) & set(blamed)), tuple(blamed), num_measured)
