"""Which source each sample of a stage comes from: a pattern that keeps to the shares at every sample, found by arithmetic.

A pattern of W = sum of the weights slots gives each source as many as its weight, spread so evenly that after any number of slots no source
is a whole sample away from its share (Tijdeman, "The chairman assignment problem", 1980). Each repetition begins at another, keyed place of
the pattern, so that no slot of the batch, and no rank, sees one source for ever. A prefix of the order never depends on what comes later:
a stage may end, and another be added, at any sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Final

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import ConfigError
from surefoot.data.order import splitmix64

MIXTURE: Final = "chairman-rotated/1"
"""Name and version of the pattern. Cursors carry it, as they carry the permutation's."""

MAX_PERIOD: Final = 1 << 15
"""Longest pattern: a share is kept to within 1 in 65,536; what the weights say exactly is kept exactly when their sum is not above it."""

I64Array = npt.NDArray[np.int64]


class Mixture:
    """The order of sources in one stage. `weights` are integers, one per source, 0 for a source that gives nothing; `key` is 64 bits.

    At every sample the count of a source is less than two samples away from its share.
    """

    def __init__(self, weights: Sequence[int], *, key: int) -> None:
        if not any(weights) or min(weights) < 0:
            raise ValueError(f"weights {tuple(weights)}: wanted numbers from 0 on, one at least above it")
        self.weights = np.array(weights, dtype=np.int64)
        self.period = int(self.weights.sum())
        self._key = np.uint64(key)
        self._pattern, self._before = _pattern(tuple(int(weight) for weight in weights))
        self._slots = [np.flatnonzero(self._pattern == source) for source in range(len(self.weights))]

    def at(self, offsets: npt.ArrayLike) -> tuple[I64Array, I64Array]:
        """(source, how many samples of that source the stage gave before) of the samples at `offsets` into the stage."""
        periods, places = np.divmod(np.atleast_1d(np.asarray(offsets, dtype=np.int64)), self.period)
        begins = self._begins(periods)
        slots = (places + begins) % self.period
        sources = self._pattern[slots]
        here = self._before[slots, sources] - self._before[begins, sources]
        return sources, periods * self.weights[sources] + np.where(slots >= begins, here, here + self.weights[sources])

    def counts(self, offset: int) -> I64Array:
        """How many samples each source gives among the first `offset` of the stage."""
        period, place = divmod(offset, self.period)
        begin = int(self._begins(np.array([period], dtype=np.int64))[0])
        end = begin + place
        here = self._before[end % self.period] - self._before[begin] + (self.weights if end >= self.period else 0)
        counts: I64Array = period * self.weights + here
        return counts

    def offset_of(self, source: int, counts: npt.ArrayLike) -> I64Array:
        """Where in the stage the samples of `source` numbered `counts` come, the inverse of `at`. ValueError for one without weight."""
        weight = int(self.weights[source])
        if not weight:
            raise ValueError(f"source {source} has no weight")
        periods, within = np.divmod(np.atleast_1d(np.asarray(counts, dtype=np.int64)), weight)
        begins = self._begins(periods)
        slots: I64Array = self._slots[source][(within + self._before[begins, source]) % weight]
        offsets: I64Array = periods * self.period + (slots - begins) % self.period
        return offsets

    def _begins(self, periods: I64Array) -> I64Array:
        begins: I64Array = (splitmix64(self._key ^ splitmix64(periods.astype(np.uint64))) % np.uint64(self.period)).astype(np.int64)
        return begins


def integer_weights(weights: Mapping[str, float], *, where: str) -> tuple[int, ...]:
    """Integers in the proportion of `weights`: exact when their sum stays within MAX_PERIOD, else the nearest that do.

    Raises ConfigError when a weight is so small that its source would get nothing.
    """
    exact = [Fraction(str(weight)) for weight in weights.values()]
    total = sum(exact, Fraction(0))
    if total <= 0:
        raise ConfigError("the weights of all sources are 0", where=where, hint="give at least one a weight above 0")
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    whole = [weight // gcd(*whole) for weight in whole]
    if sum(whole) > MAX_PERIOD:
        whole = _nearest([weight / total for weight in exact])
    for (name, weight), given in zip(weights.items(), whole, strict=True):
        if weight > 0 and not given:
            what = f"source {name!r} has a share of {float(Fraction(str(weight)) / total):.2g}: it would get no sample"
            raise ConfigError(what, where=where, hint=f"give it at least {1 / MAX_PERIOD:.1g} of the whole, or 0")
    return tuple(whole)


def _nearest(shares: Sequence[Fraction]) -> list[int]:
    """Integers that add up to MAX_PERIOD, by largest remainders."""
    whole = [int(share * MAX_PERIOD) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: shares[index] * MAX_PERIOD - whole[index], reverse=True)
    for index in by_remainder[: MAX_PERIOD - sum(whole)]:
        whole[index] += 1
    return whole


@lru_cache(maxsize=64)
def _pattern(weights: tuple[int, ...]) -> tuple[I64Array, I64Array]:
    """(source of each slot (W,), how many slots of each source come before each slot (W + 1, sources)).

    At slot n a source may be chosen once its share of n is ahead of its count by 1 / (2k - 2), k sources; of these the one whose deadline
    comes first is.
    """
    shares = np.array(weights, dtype=np.int64)
    period, num_sources = int(shares.sum()), len(weights)
    live = np.flatnonzero(shares)
    pattern = np.empty(period, dtype=np.int64)
    if live.size == 1:
        pattern[:] = live[0]
    else:
        rate, counts, factor = shares[live], np.zeros(live.size, dtype=np.int64), 2 * live.size - 2
        for slot in range(period):
            ahead = (slot + 1) * rate - counts * period
            deadline = np.where(ahead * factor >= period, (period * (factor - 1) - ahead * factor) / rate, np.inf)
            chosen = int(np.argmin(deadline))
            counts[chosen] += 1
            pattern[slot] = live[chosen]
    before = np.zeros((period + 1, num_sources), dtype=np.int64)
    np.cumsum(pattern[:, None] == np.arange(num_sources), axis=0, out=before[1:])
    return pattern, before
