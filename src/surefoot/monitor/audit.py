"""Who computed wrongly: pure, from what several ranks say about the same thing. Bits are compared, so there is nothing to be tuned.

A thing is a replicated tensor, or the gradient of one atom that several ranks computed. Ranks that are well say the same about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Opinion:
    """What `rank` says about the thing `about`."""

    about: str
    rank: int
    digest: int


@dataclass(frozen=True, slots=True)
class Ruling:
    """`ranks` are those that are wrong when `verdict` is "named", all that may be when it is "inconclusive"; `about` is what differs.

    Without a witness nobody's word stands: bits do not repeat here at all, so that they differ accuses no device.
    """

    verdict: Literal["agreed", "named", "inconclusive"]
    ranks: tuple[int, ...] = ()
    about: tuple[str, ...] = ()
    reason: str = ""
    has_witness: bool = True


def rule(opinions: Sequence[Opinion]) -> Ruling:
    """Who is wrong. A rank that says two things about one is; so is one that most of the others outvote.

    Once a rank is known to be wrong, what it says counts no more, and what is left is looked at again: one wrong rank explains everything
    that it took part in. What nobody explains makes the ruling inconclusive, for naming a well rank costs a node, and the sick one stays.
    """
    said: dict[str, dict[int, set[int]]] = {}
    for opinion in opinions:
        said.setdefault(opinion.about, {}).setdefault(opinion.rank, set()).add(opinion.digest)
    differing = {about: by_rank for about, by_rank in said.items() if len(set().union(*by_rank.values())) > 1}
    if not differing:
        return Ruling("agreed")
    if not any(_is_witnessed(by_rank) for by_rank in differing.values()):
        candidates = set().union(*differing.values())
        return Ruling("inconclusive", _sorted(candidates), tuple(sorted(differing)), _unsteady_words(differing), has_witness=False)
    fickle = {rank for by_rank in differing.values() for rank, digests in by_rank.items() if len(digests) > 1}
    wrong = set(fickle)
    while found := {rank for by_rank in differing.values() for rank in _outvoted(by_rank, without=wrong)}:
        wrong |= found
    open_about = {about: ranks for about, by_rank in differing.items() if (ranks := _undecided(by_rank, without=wrong))}
    if open_about:
        candidates = wrong.union(*open_about.values())
        return Ruling("inconclusive", _sorted(candidates), tuple(sorted(differing)), _open_words(open_about))
    how = "contradicts itself" if wrong == fickle else "is outvoted"
    named = f"rank {_listed(wrong)} {how}" if len(wrong) == 1 else f"ranks {_listed(wrong)} contradict themselves, or are outvoted"
    return Ruling("named", _sorted(wrong), tuple(sorted(differing)), f"{named}: {len(differing)} of {len(said)} comparisons differ")


def _outvoted(by_rank: Mapping[int, set[int]], *, without: set[int]) -> set[int]:
    """The ranks that say something else than a strict majority of those that are heard."""
    heard = {rank: next(iter(digests)) for rank, digests in by_rank.items() if rank not in without}
    if not heard:
        return set()
    digest, votes = Counter(heard.values()).most_common(1)[0]
    return {rank for rank, other in heard.items() if other != digest} if 2 * votes > len(heard) else set()


def _undecided(by_rank: Mapping[int, set[int]], *, without: set[int]) -> set[int]:
    """The ranks that are left and do not agree."""
    left = {rank: digests for rank, digests in by_rank.items() if rank not in without}
    return set(left) if left and len(set().union(*left.values())) > 1 else set()


def _is_witnessed(by_rank: Mapping[int, set[int]]) -> bool:
    """Whether two ranks that do not contradict themselves say the same; of two ranks one that does not is enough to suspect the other."""
    steady = [next(iter(digests)) for digests in by_rank.values() if len(digests) == 1]
    return len(set(steady)) < len(steady) or (len(by_rank) == 2 and bool(steady))


def _unsteady_words(differing: Mapping[str, Mapping[int, set[int]]]) -> str:
    about = min(differing)
    ranks = _listed(set(differing[about]))
    return f"no two of ranks {ranks} agree about {about}, nor does it repeat on them: bits do not repeat here, which accuses no device"


def _open_words(open_about: Mapping[str, set[int]]) -> str:
    about, ranks = min(open_about.items())
    more = f", and {len(open_about) - 1} more" if len(open_about) > 1 else ""
    return f"ranks {_listed(ranks)} disagree about {about}{more}, and there is no majority"


def _sorted(ranks: set[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(sizes, offsets) of what a rank holds of a tensor."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors of which these ranks, at least two, hold the same part."""

    ranks: tuple[int, ...]
    keys: tuple[str, ...]


def shared_parts(held_by_ranks: Sequence[Mapping[str, Box]]) -> tuple[Shared, ...]:
    """What is replicated, by who holds it: one entry per set of ranks, sorted. Empty boxes have no bits."""
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, held in enumerate(held_by_ranks):
        for key, box in held.items():
            if 0 not in box[0]:
                holders.setdefault((key, box), []).append(rank)
    keys: dict[tuple[int, ...], list[str]] = {}
    for (key, _), ranks in holders.items():
        if len(ranks) > 1:
            keys.setdefault(tuple(ranks), []).append(key)
    return tuple(Shared(ranks, tuple(sorted(keys[ranks]))) for ranks in sorted(keys))
