"""The sum behind "sf1" in host memory, with numpy alone: as fast as two passes over the cache allow.

What the sum is stands in `digest`. Here is how: numpy multiplies and adds 64-bit words in one loop (einsum), four times as fast as a cast,
a product and a sum one after the other. 32-bit words are taken in pairs without a cast: for X = lo + 2^32 hi,

    lo * w0 + hi * w1  =  X * w0 + hi * (w1 - 2^32 * w0)   mod 2^64

so that one loop runs over the memory as it is and one over X >> 32. Narrower words are widened first. All of it in pieces that stay in the
cache of a core, because more memory than that costs page faults and bandwidth.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
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

_PIECE = 1 << 15  # words worked on at once: at 8 bytes each, input, widened words and weights fit the second cache of a core
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
        words = np.frombuffer(data, dtype=WORD_TYPES[self.word_bytes])
        if self.num_done + len(words) > self.num_words:
            raise ValueError(f"{self.num_done} + {len(words)} words, but the box has {self.num_words}")
        run = self._runs.length
        at = 0
        while at < len(words):
            number, within = divmod(self.num_done, run)
            left = len(words) - at
            if within or left < run or run >= _LONG_RUN:
                taken = min(run - within, left)
                self._sum += consecutive(words[at : at + taken], first=int(self._runs.starts(number, number + 1)[0]) + within)
            else:
                num_runs = min(left // run, max(1, _PIECE // run))
                taken = num_runs * run
                self._sum += _scattered(words[at : at + taken].reshape(num_runs, run), starts=self._runs.starts(number, number + num_runs))
            at += taken
            self.num_done += taken

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
        self._outer = [(size, stride) for size, stride in zip(sizes[:outer], strides[:outer], strict=True)]

    def starts(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """First global word of runs begin..end-1."""
        number = np.arange(begin, end, dtype=np.int64)
        start = np.full(len(number), self._first, dtype=np.int64)
        for size, stride in reversed(self._outer):
            number, along = np.divmod(number, size)
            start += along * stride
        return start


def consecutive(words: Words, *, first: int) -> int:
    """Sum over words whose global indices are first, first + 1, ..."""
    total = 0
    for at, length, column, row in _pieces(len(words), first=first):
        total += _row_weight(row) * _in_row(words[at : at + length], column=column)
    return total & MASK


def _pieces(num_words: int, *, first: int) -> Iterator[tuple[int, int, int, int]]:
    """(position, length, column, row) of pieces that cross no row."""
    at = 0
    while at < num_words:
        row, column = divmod(first + at, BLOCK)
        length = min(num_words - at, BLOCK - column, _PIECE)
        yield at, length, column, row
        at += length


def _in_row(words: Words, *, column: int) -> int:
    """Sum over words of one row, without the row's weight."""
    if words.itemsize == 4 and len(words) > 2:
        odd = column % 2
        if (words.ctypes.data + 4 * odd) % 8 == 0:
            even = (len(words) - odd) // 2 * 2 + odd
            total = _pairs(words[odd:even].view(np.uint64), pair=(column + odd) // 2)
            for i in (0,) * odd + (even,) * (even < len(words)):
                total += int(words[i]) * int(_columns()[column + i])
            return total
    wide = _scratch()[0][: len(words)]
    np.copyto(wide, words)
    return int(np.einsum("i,i->", wide, _columns()[column : column + len(words)]))


def _pairs(pairs: Wide, *, pair: int) -> int:
    first, second = _pair_weights()
    high = _scratch()[0][: len(pairs)]
    np.right_shift(pairs, 32, out=high)
    end = pair + len(pairs)
    return int(np.einsum("i,i->", pairs, first[pair:end])) + int(np.einsum("i,i->", high, second[pair:end]))


def _scattered(runs: Words, *, starts: npt.NDArray[np.int64]) -> int:
    """Sum over short runs, one a row of `runs`, that start at the global words `starts`."""
    length = runs.shape[1]
    columns, rows = starts & (BLOCK - 1), starts >> 16
    wide, weights = (buffer[: runs.size].reshape(runs.shape) for buffer in _scratch())
    np.copyto(wide, runs)
    if length < _SHORT_RUN:
        index = columns[:, None] + np.arange(length)
        np.take(_columns_twice(), index, out=weights, mode="clip")
    else:
        weights = _windows(length)[columns]
    sums = np.einsum("ij,ij->i", wide, weights)
    total = int((sums * row_weights(rows)).sum())
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


def _windows(length: int) -> Wide:
    """Row j: B(j), B(j + 1), ... B(j + length - 1), around the end; a view, no copy."""
    return np.lib.stride_tricks.as_strided(_columns_twice(), shape=(BLOCK, length), strides=(8, 8), writeable=False)


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
