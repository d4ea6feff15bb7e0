"""How much of a text is said again: a unit of bytes over and over, and n-grams of words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_PERIOD: Final = 256
_NUM_PROBES: Final = 32
_PROBE_BYTES: Final = 16
_NUM_TRIED: Final = 4
_MIN_PROBES: Final = 4
_MIN_REPEATS: Final = 3
_MIN_COVERED_BYTES: Final = 48
_CHUNK_BYTES: Final = 1 << 20
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)

U64Array = npt.NDArray[np.uint64]


def repeated_unit_share(data: bytes) -> float:
    """Share of the bytes that lie in repeats of one unit of at most 256 bytes, three times or more in a row; a bound from below.

    A unit that covers a quarter of the text is hit by 8 of 32 probes spread evenly over it. Each says at which distance its 16 bytes come
    again, and only distances that 4 of them name are tried: all 256 would cost 256 passes.
    """
    period, share = _repeated(data)
    return share if period else 0.0


def repeated_unit_of(data: bytes) -> bytes:
    """The unit that covers most, as it first stands in the text; empty where nothing is repeated."""
    period, _ = _repeated(data)
    if not period:
        return b""
    runs = _runs(np.frombuffer(data, dtype=np.uint8), period=period)
    longest = max(runs, key=lambda run: run[1] - run[0])
    return data[longest[0] : longest[0] + period]


def unit_share(data: bytes, unit: bytes) -> float:
    """Share of the bytes that lie in repeats of `unit` itself, twice or more in a row."""
    if not unit or not data:
        return 0.0
    pair, covered, at = unit + unit, 0, 0
    while (start := data.find(pair, at)) >= 0:
        at = start + len(pair)
        while data.startswith(unit, at):
            at += len(unit)
        covered += at - start
    return covered / len(data)


def _repeated(data: bytes) -> tuple[int, float]:
    """(period, share of the bytes) of the unit that covers most; (0, 0.0) where none does."""
    if len(data) < _MIN_COVERED_BYTES:
        return 0, 0.0
    distances: Counter[int] = Counter()
    stride = max(1, (len(data) - _PROBE_BYTES) // _NUM_PROBES)
    for start in range(0, len(data) - _PROBE_BYTES, stride):
        probe = data[start : start + _PROBE_BYTES]
        again = data.find(probe, start + 1, start + MAX_PERIOD + _PROBE_BYTES)
        if again >= 0:
            distances[again - start] += 1
    values = np.frombuffer(data, dtype=np.uint8)
    best = (0, 0.0)
    likely = [period for period, count in distances.most_common(_NUM_TRIED) if count >= _MIN_PROBES]
    for period in sorted(likely):
        covered = sum(end - start for start, end in _runs(values, period=period))
        if covered / len(data) > best[1]:
            best = (period, covered / len(data))
    return best


def _runs(values: npt.NDArray[np.uint8], *, period: int) -> list[tuple[int, int]]:
    """[start, end) of the stretches that repeat with this period, three times or more."""
    least = max(_MIN_COVERED_BYTES, _MIN_REPEATS * period) - period  # bytes that equal those one period before
    runs: list[tuple[int, int]] = []
    open_at = 0
    for start in range(0, len(values) - period, _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, len(values) - period)
        breaks = np.flatnonzero(values[start + period : end + period] != values[start:end]) + start
        for at in _ends_of_long(breaks, open_at=open_at, least=least):
            runs.append((at[0], at[1] + period))
        open_at = int(breaks[-1]) + 1 if breaks.size else open_at
    if len(values) - period - open_at >= least:
        runs.append((open_at, len(values)))
    return runs


def _ends_of_long(breaks: npt.NDArray[np.int64], *, open_at: int, least: int) -> list[tuple[int, int]]:
    firsts = np.concatenate([[open_at], breaks[:-1] + 1]) if breaks.size else np.empty(0, dtype=np.int64)
    long = np.flatnonzero(breaks - firsts >= least)
    return [(int(firsts[index]), int(breaks[index])) for index in long]


class WordGrams:
    """N-grams of the words of one text, as 64-bit hashes: two that collide are one in 1e19, and only shares are asked."""

    def __init__(self, words: Sequence[str]) -> None:
        self._ids = np.fromiter((hash(word) for word in words), dtype=np.int64, count=len(words)).view(np.uint64)
        self._lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))

    @cached_property
    def _num_characters(self) -> int:
        return int(self._lengths.sum()) + max(0, len(self._lengths) - 1)

    def top_share(self, n: int) -> float:
        """Share of the characters that the most frequent n-gram makes up; 0 where none comes twice."""
        grams = self._grams(n)
        if not grams.size:
            return 0.0
        _, firsts, counts = np.unique(grams, return_index=True, return_counts=True)
        most = int(counts.max())
        if most < 2:
            return 0.0
        lengths = np.convolve(self._lengths, np.ones(n, dtype=np.int64), mode="valid") + n - 1
        longest = int(lengths[firsts[counts == most]].max())
        return min(1.0, most * longest / self._num_characters)

    def repeated_share(self, n: int) -> float:
        """Share of the characters of words that lie in an n-gram which stood there before."""
        grams = self._grams(n)
        if not grams.size:
            return 0.0
        again = np.ones(grams.size, dtype=bool)
        again[np.unique(grams, return_index=True)[1]] = False
        edges = np.zeros(len(self._ids) + 1, dtype=np.int64)
        edges[: grams.size] += again
        edges[n : n + grams.size] -= again
        covered = np.cumsum(edges)[:-1] > 0
        return float(self._lengths[covered].sum() / max(1, self._lengths.sum()))

    def _grams(self, n: int) -> U64Array:
        num_grams = len(self._ids) - n + 1
        if num_grams < 1:
            return np.empty(0, dtype=np.uint64)
        grams = np.zeros(num_grams, dtype=np.uint64)
        for offset in range(n):
            grams = (grams ^ self._ids[offset : offset + num_grams]) * _ODD
            grams ^= grams >> np.uint64(29)
        return grams
