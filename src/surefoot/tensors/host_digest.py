"""The sum behind "sf1" in host memory, with numpy alone: as fast as two passes over the cache allow.

What the sum is stands in `digest`. Here is how. 32-bit words are taken in pairs: for X = lo + 2^32 hi,

    lo * w0 + hi * w1  =  X * w0 + hi * (w1 - 2^32 * w0)   mod 2^64

so that one loop multiplies and adds (einsum) over the memory as it is and one over X >> 32; no word is widened. Narrower words are widened,
multiplied and added one after the other. All of it in pieces that stay in the cache of a core, in buffers that are used again: fresh
memory costs more than the sum. Every call has its microsecond, so short runs are taken many at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

ROW_SEED = 0x243F6A8885A308D3
COLUMN_SEED = 0x13198A2E03707344
BLOCK = 1 << 16
MASK = (1 << 64) - 1
WORD_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}

Words = npt.NDArray[np.unsignedinteger[Any]]
Wide = npt.NDArray[np.uint64]

_PIECE = BLOCK  # words that are worked on at once, at most; with weights and buffer no more than a core's second cache
_LONG_RUN = 1 << 13  # from here on a run is worth calls of its own
_SHORT_RUN = 16  # below, picking weights one by one is faster than copying rows of them


class HostBox:
    """Local. Sum over the words of `runs`, which come in pieces and in order; `value` when all have come."""

    def __init__(self, runs: Runs, *, word_bytes: int) -> None:
        self.word_bytes = word_bytes
        self.num_words = runs.number * runs.length
        self.num_done = 0
        self._runs = runs
        self._sum = 0

    def update(self, data: Any) -> None:
        """The next bytes, whole words of them: anything with a buffer. ValueError when they are more than the box has."""
        words = np.frombuffer(data, dtype=WORD_TYPES[self.word_bytes]).reshape(-1)
        if self.num_done + len(words) > self.num_words:
            raise ValueError(f"{self.num_done} + {len(words)} words, but the box has {self.num_words}")
        length = self._runs.length
        while len(words):
            number, within = divmod(self.num_done, length)
            num_runs = 0 if within or length >= _LONG_RUN else min(len(words) // length, _PIECE // length)
            if num_runs > 1:
                taken = num_runs * length
                self._sum += self._whole_runs(words[:taken].reshape(num_runs, length), number=number)
            else:
                taken = min(length - within, len(words))
                self._sum += consecutive(words[:taken], first=self._runs.start(number) + within)
            words = words[taken:]
            self.num_done += taken

    def _whole_runs(self, runs: Words, *, number: int) -> int:
        step = self._runs.step
        if step and BLOCK // step * self._runs.length >= _LONG_RUN:
            return _spaced(runs, first=self._runs.start(number), step=step)
        return _scattered(runs, starts=self._runs.starts(number, number + len(runs)))

    @property
    def value(self) -> int:
        if self.num_done != self.num_words:
            raise ValueError(f"{self.num_done} of {self.num_words} words have come")
        return self._sum & MASK


class Runs:
    """A box as runs of `length` words that are contiguous in the global tensor."""

    def __init__(self, sizes: Sequence[int], *, global_shape: Sequence[int], offsets: Sequence[int], words_per_element: int) -> None:
        dim = len(sizes)
        while dim > 0 and sizes[dim - 1] == global_shape[dim - 1]:
            dim -= 1  # whole dims join the run; the first cut one ends it
        outer = max(dim - 1, 0)
        strides = [math.prod(global_shape[k + 1 :]) * words_per_element for k in range(len(sizes))]
        self.length = math.prod(sizes[outer:]) * words_per_element
        self.number = math.prod(sizes[:outer])
        self._first = sum(offset * stride for offset, stride in zip(offsets[: outer + 1], strides[: outer + 1], strict=True))
        self._outer: list[tuple[int, int]] = []  # (size, stride), innermost first
        for size, stride in reversed(list(zip(sizes[:outer], strides[:outer], strict=True))):
            if self._outer and math.prod(self._outer[-1]) == stride:
                self._outer[-1] = (self._outer[-1][0] * size, self._outer[-1][1])  # a whole dim inside a cut one: evenly spaced too
            else:
                self._outer.append((size, stride))

    @property
    def step(self) -> int | None:
        """Words from the start of a run to that of the next one where that is always the same."""
        return self._outer[0][1] if len(self._outer) == 1 else None

    def start(self, number: int) -> int:
        """First global word of a run."""
        start = self._first
        for size, stride in self._outer:
            number, along = divmod(number, size)
            start += along * stride
        return start

    def starts(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """First global word of runs begin..end-1."""
        number = np.arange(begin, end, dtype=np.int64)
        start = np.full(len(number), self._first, dtype=np.int64)
        for size, stride in self._outer:
            number, along = np.divmod(number, size)
            start += along * stride
        return start


def consecutive(words: Words, *, first: int) -> int:
    """Sum over words whose global indices are first, first + 1, ..."""
    total = at = 0
    while at < len(words):
        row, column = divmod(first + at, BLOCK)
        length = min(len(words) - at, BLOCK - column)
        total += _row_weight(row) * _within_row(words[at : at + length].reshape(1, length), column=column, step=0)
        at += length
    return total & MASK


def _spaced(runs: Words, *, first: int, step: int) -> int:
    """Sum over short runs, one a row of `runs`, of which each starts `step` words after the one before."""
    length = runs.shape[1]
    total = at = 0
    while at < len(runs):
        row, column = divmod(first + at * step, BLOCK)
        inside = (BLOCK - column - length) // step + 1  # runs that end before the border
        if inside > 0:
            total += _row_weight(row) * _within_row(runs[at : at + inside], column=column, step=step)
            at += inside
        else:
            total += consecutive(runs[at], first=first + at * step)
            at += 1
    return total & MASK


def _within_row(runs: Words, *, column: int, step: int) -> int:
    """Sum, without the row's weight, over runs that start at `column`, `column + step`, ... of one row."""
    num_runs, length = runs.shape
    if runs.itemsize == 4 and length > 2:
        odd = column % 2
        even = odd + (length - odd) // 2 * 2
        pairs = runs[:, odd:even].view(np.uint64)
        if pairs.flags.aligned and (num_runs == 1 or not (odd or step % 2 or even < length)):
            ends = (*range(odd), *range(even, length))
            singles = sum(int(runs[0, i]) * int(_columns()[column + i]) for i in ends)
            return singles + _pairs(pairs, pair=(column + odd) // 2, step=step // 2)
    wide = _scratch()[0][: runs.size].reshape(runs.shape)
    np.copyto(wide, runs)
    np.multiply(wide, _strided(_columns(), column, shape=runs.shape, step=step), out=wide)
    return int(np.add.reduce(wide, axis=None))


def _pairs(pairs: Wide, *, pair: int, step: int) -> int:
    first, second = (_strided(weights, pair, shape=pairs.shape, step=step) for weights in _pair_weights())
    high = _scratch()[0][: pairs.size].reshape(pairs.shape)
    np.right_shift(pairs, 32, out=high)
    return int(np.einsum("ij,ij->", pairs, first)) + int(np.einsum("ij,ij->", high, second))


def _strided(weights: Wide, at: int, *, shape: tuple[int, ...], step: int) -> Wide:
    """Row i: weights from `at + i * step` on; a view."""
    return np.ndarray(shape, np.uint64, weights, offset=8 * at, strides=(8 * step, 8))


def _scattered(runs: Words, *, starts: npt.NDArray[np.int64]) -> int:
    """Sum over short runs, one a row of `runs`, that start at the global words `starts`."""
    length = runs.shape[1]
    columns, rows = starts & (BLOCK - 1), starts >> 16
    wide, weights = (buffer[: runs.size].reshape(runs.shape) for buffer in _scratch())
    np.copyto(wide, runs)
    if length < _SHORT_RUN:
        np.take(_columns_twice(), columns[:, None] + np.arange(length), out=weights, mode="clip")
    else:
        weights = _strided(_columns_twice(), 0, shape=(BLOCK, length), step=1)[columns]
    total = int((np.einsum("ij,ij->i", wide, weights) * row_weights(rows)).sum())
    for run in np.flatnonzero(columns + length > BLOCK).tolist():  # what lies past the border has the weight of the next row
        border = BLOCK - int(columns[run])
        past = int(np.einsum("i,i->", wide[run, border:], weights[run, border:]))
        total += past * (_row_weight(int(rows[run]) + 1) - _row_weight(int(rows[run])))
    return total


def column_weights() -> Wide:
    """B(j) for every j."""
    return _columns().copy()


def row_weights(rows: npt.NDArray[np.integer[Any]]) -> Wide:
    """A(k) for each k of `rows`."""
    weights: Wide = _splitmix64(rows.astype(np.uint64) + np.uint64(ROW_SEED)) | np.uint64(1)
    return weights


def _row_weight(row: int) -> int:
    return int(_splitmix64((ROW_SEED + row) & MASK)) | 1


@lru_cache(maxsize=1)
def _columns() -> Wide:
    columns: Wide = _splitmix64(np.arange(BLOCK, dtype=np.uint64) + np.uint64(COLUMN_SEED)) | np.uint64(1)
    return columns


@lru_cache(maxsize=1)
def _columns_twice() -> Wide:
    return np.concatenate([_columns(), _columns()])


@lru_cache(maxsize=1)
def _pair_weights() -> tuple[Wide, Wide]:
    even, odd = _columns()[0::2].copy(), _columns()[1::2]
    return even, odd - (even << np.uint64(32))


def _splitmix64(state: Any) -> Any:
    """Of a Python integer or of an array of uint64, which wraps by itself."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


_own = threading.local()


def _scratch() -> tuple[Wide, Wide]:
    """Two buffers of this thread for one piece."""
    if not hasattr(_own, "scratch"):
        _own.scratch = (np.empty(_PIECE, np.uint64), np.empty(_PIECE, np.uint64))
    buffers: tuple[Wide, Wide] = _own.scratch
    return buffers
