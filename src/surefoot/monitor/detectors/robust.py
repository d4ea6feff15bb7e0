"""Medians of moving windows, and the distance that half of the values keep from them: what one outlier cannot move."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SIGMA_OF_MAD = 1.4826
"""Standard deviation over MAD of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Window:
    """The newest `size` values, oldest first, and the same values in order, so that a median costs a look and a MAD a bisection."""

    size: int
    values: tuple[float, ...] = ()
    ordered: tuple[float, ...] = ()

    def push(self, value: float) -> Window:
        ordered = list(self.ordered)
        if len(self.values) == self.size:
            del ordered[bisect_left(ordered, self.values[0])]
            insort(ordered, value)
            return Window(self.size, (*self.values[1:], value), tuple(ordered))
        insort(ordered, value)
        return Window(self.size, (*self.values, value), tuple(ordered))

    def __len__(self) -> int:
        return len(self.values)


def window_of(values: Sequence[float], *, size: int) -> Window:
    """The window after `values`."""
    kept = tuple(float(value) for value in values[-size:])
    return Window(size, kept, tuple(sorted(kept)))


def median(ordered: Sequence[float]) -> float:
    """Of values in order; at least one."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0


def mad(ordered: Sequence[float], *, centre: float) -> float:
    """The smallest distance from `centre` within which more than half of the values lie, of values in order.

    Any run of so many neighbours has its farthest at one of its ends: the left end's distance falls and the right end's grows as the run
    moves right, so the best run is where they cross.
    """
    width = len(ordered) // 2 + 1
    low, high = 0, len(ordered) - width
    while low < high:
        middle = (low + high) // 2
        if centre - ordered[middle] > ordered[middle + width - 1] - centre:
            low = middle + 1
        else:
            high = middle
    best = max(centre - ordered[low], ordered[low + width - 1] - centre)
    return min(best, max(centre - ordered[low - 1], ordered[low + width - 2] - centre)) if low else best


def quantum(ordered: Sequence[float]) -> float:
    """The step that values were rounded to, 0.0 where most are unlike: a MAD of rounded values may be 0 while they do move."""
    distinct = sorted(set(ordered))
    if len(distinct) < 2 or 2 * len(distinct) > len(ordered):
        return 0.0
    return min(right - left for left, right in pairwise(distinct))


def clipped(value: float, *, centre: float, reach: float) -> float:
    return max(centre - reach, min(centre + reach, value))
