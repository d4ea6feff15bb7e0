"""The sum behind "sf1" in host memory, with numpy alone: as fast as two passes over the cache allow.

What the sum is stands in `digest`. Here is how. 32-bit words are taken in pairs: for X = lo + 2^32 hi,

    lo * w0 + hi * w1  =  X * w0 + hi * (w1 - 2^32 * w0)   mod 2^64

so that one loop multiplies and adds (einsum) over the memory as it is and one over X >> 32; no word is widened. Narrower words are widened.
Where the same columns come again, in the next block or after some runs of a shard, that is to floats, and a product of matrices sums
several turns at once: weights cut into digits keep every sum a whole number below 2^53, which floats add without rounding, in any order.
All of it in pieces that stay in the cache of a core, in buffers that are used again: fresh memory costs more than the sum. Every call has
its microsecond, so short runs are taken many at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
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
_TURNS = 4  # of a cycle at once
_SLAB = 1 << 13  # words of each turn at once
_CYCLE_WORDS = 1 << 17  # longer ones have weights that no cache holds
_DIGIT_BITS = {1: 32, 2: 22}  # by bytes of a word: a word times a digit, summed over a slab, stays below 2^53
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
            num_runs = 0 if within or length >= _LONG_RUN else len(words) // length
            if num_runs > 1:
                num_runs, found = self._whole_runs(words[: num_runs * length].reshape(num_runs, length), number=number)
                self._sum += found
                taken = num_runs * length
            else:
                taken = min(length - within, len(words))
                self._sum += consecutive(words[:taken], first=self._runs.start(number) + within)
            words = words[taken:]
            self.num_done += taken

    def _whole_runs(self, runs: Words, *, number: int) -> tuple[int, int]:
        """How many of them were taken, and their sum."""
        step, most = self._runs.step, _PIECE // self._runs.length
        num_runs = _runs_of_cycle(step) if step else 1
        if step and runs.itemsize in _DIGIT_BITS and _SLAB <= num_runs * self._runs.length <= _CYCLE_WORDS:
            early = -number % num_runs  # what is left of a turn that began in an earlier piece
            num_turns = min((len(runs) - early) // num_runs, _TURNS)
            if num_turns > 1 and not early:
                cycle = _cycle(self._runs.start(0) % BLOCK, step=step, length=self._runs.length, word_bytes=runs.itemsize)
                turns = runs[: num_turns * num_runs].reshape(num_turns, cycle.num_words)
                return num_turns * num_runs, _turns(turns, cycle=cycle, first_row=self._runs.start(number) // BLOCK)
            if num_turns > 1:
                most = min(most, early)
        runs = runs[:most]
        if step and BLOCK // step * self._runs.length >= _LONG_RUN:
            return len(runs), _spaced(runs, first=self._runs.start(number), step=step)
        return len(runs), _scattered(runs, starts=self._runs.starts(number, number + len(runs)))

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
        num_rows = min((len(words) - at) // BLOCK, _TURNS) if column == 0 and words.itemsize in _DIGIT_BITS else 0
        if num_rows > 1:
            length, cycle = num_rows * BLOCK, _cycle(0, step=BLOCK, length=BLOCK, word_bytes=words.itemsize)
            total += _turns(words[at : at + length].reshape(num_rows, BLOCK), cycle=cycle, first_row=row)
        else:
            total += _row_weight(row) * _within_row(words[at : at + length], column=column)
        at += length
    return total & MASK


def _within_row(words: Words, *, column: int) -> int:
    """Sum, without the row's weight, over words that start at `column` of one row."""
    if words.itemsize == 4 and len(words) > 2:
        odd = column % 2
        even = odd + (len(words) - odd) // 2 * 2
        pairs = words[odd:even].view(np.uint64)
        if pairs.flags.aligned:
            total = _pairs(pairs, pair=(column + odd) // 2)
            if odd:
                total += int(words[0]) * int(_columns()[column])
            if even < len(words):
                total += int(words[even]) * int(_columns()[column + even])
            return total
    wide = _scratch()[0][: len(words)]
    np.copyto(wide, words)
    np.multiply(wide, _columns()[column : column + len(words)], out=wide)
    return int(np.add.reduce(wide))


def _pairs(pairs: Wide, *, pair: int) -> int:
    first, second = _pair_weights()
    high = _scratch()[0][: len(pairs)]
    np.right_shift(pairs, 32, out=high)
    end = pair + len(pairs)
    return int(np.einsum("i,i->", pairs, first[pair:end])) + int(np.einsum("i,i->", high, second[pair:end]))


@dataclass(frozen=True, slots=True)
class _Cycle:
    """Runs at even distances until one starts at the column where the first did: from there on the weights, without the rows', repeat.

    `slabs` are (begin, end, digits): words of the cycle in the same row, and their columns' weights in digits, lowest first, as floats.
    `rows` are the rows that it meets, counted from the first, and `firsts` the first slab in each. The next turn is `num_rows` further.
    """

    num_words: int
    num_rows: int
    rows: tuple[int, ...]
    firsts: tuple[int, ...]
    slabs: tuple[tuple[int, int, npt.NDArray[np.float64]], ...]


def _runs_of_cycle(step: int) -> int:
    return BLOCK // math.gcd(step, BLOCK)


@lru_cache(maxsize=8)
def _cycle(column: int, *, step: int, length: int, word_bytes: int) -> _Cycle:
    index = (column + step * np.arange(_runs_of_cycle(step))[:, None] + np.arange(length)).reshape(-1)
    rows, weights, bits = index // BLOCK, _columns()[index % BLOCK], _DIGIT_BITS[word_bytes]
    digits = np.stack([(weights >> np.uint64(low)) & np.uint64((1 << bits) - 1) for low in range(0, 64, bits)]).astype(np.float64)
    borders = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist()]
    begins = sorted({*range(0, len(index), _SLAB), *borders})
    return _Cycle(
        num_words=len(index),
        num_rows=_runs_of_cycle(step) * step // BLOCK,
        rows=tuple(rows[borders].tolist()),
        firsts=tuple(begins.index(border) for border in borders),
        slabs=tuple((begin, end, digits[:, begin:end].copy()) for begin, end in pairwise([*begins, len(index)])),
    )


def _turns(words: Words, *, cycle: _Cycle, first_row: int) -> int:
    """Sum over a few turns of a cycle, one a row of `words`, whose first words lie in `first_row`.

    A product of matrices of floats, all of them whole numbers, and exact: the digits of weights are so small that no sum reaches 2^53.
    """
    bits, total = _DIGIT_BITS[words.itemsize], 0
    floats = _scratch()[0].view(np.float64)
    sums = np.empty((len(cycle.slabs), -(-64 // bits), len(words)))
    for found, (begin, end, digits) in zip(sums, cycle.slabs, strict=True):
        slab = floats[: len(words) * (end - begin)].reshape(len(words), end - begin)
        np.copyto(slab, words[:, begin:end])
        np.matmul(digits, slab.T, out=found)
    in_rows = np.add.reduceat(sums.astype(np.uint64), cycle.firsts, axis=0).tolist()
    for row, by_digit in zip(cycle.rows, in_rows, strict=True):
        for digit, by_turn in enumerate(by_digit):
            for turn, part in enumerate(by_turn):
                total += (part << bits * digit) * _row_weight(first_row + row + turn * cycle.num_rows)
    return total & MASK


def _spaced(runs: Words, *, first: int, step: int) -> int:
    """Sum over short runs, one a row of `runs`, of which each starts `step` words after the one before."""
    if runs.itemsize == 4 and not (first % 2 or step % 2 or runs.shape[1] % 2) and (pairs := runs.view(np.uint64)).flags.aligned:
        high = _scratch()[0][: pairs.size].reshape(pairs.shape)
        np.right_shift(pairs, 32, out=high)
        even, odd = _pair_weights()
        return _row_by_row(((pairs, even), (high, odd)), first=first // 2, step=step // 2, block=BLOCK // 2)
    wide = _scratch()[0][: runs.size].reshape(runs.shape)
    np.copyto(wide, runs)
    return _row_by_row(((wide, _columns_twice()),), first=first, step=step, block=BLOCK)


def _row_by_row(terms: tuple[tuple[Wide, Wide], ...], *, first: int, step: int, block: int) -> int:
    """Sum over the terms, runs times weights, of spaced runs; a run may reach into the next row of `block` columns."""
    num_runs, length = terms[0][0].shape
    total = at = 0
    while at < num_runs:
        row, column = divmod(first + at * step, block)
        end = min(num_runs, at + (block - column - 1) // step + 1)  # those that start in this row
        for runs, weights in terms:
            in_row = _strided(weights, column, shape=(end - at, length), step=step)
            total += _row_weight(row) * int(np.einsum("ij,ij->", runs[at:end], in_row))
        border = block - column - (end - 1 - at) * step
        if border < length:  # what lies past the border has the weight of the next row
            past = sum(int(np.einsum("i,i->", runs[end - 1, border:], weights[: length - border])) for runs, weights in terms)
            total += past * (_row_weight(row + 1) - _row_weight(row))
        at = end
    return total & MASK


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


@lru_cache(maxsize=1 << 14)
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
    even, odd = _columns_twice()[0::2].copy(), _columns_twice()[1::2]
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
