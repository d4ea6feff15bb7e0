"""In which order the samples of one source come, over epochs and over changes of the sequence length: arithmetic, no table.

A source is cut into *units*: as long as the longest sequence that the run may ever ask for. A keyed permutation per epoch orders the units.
While sequences are as long as a unit, that is all. A stage with shorter ones cuts each unit into pieces and shuffles the pieces of
WINDOW_UNITS units at a time, so that the pieces of one unit do not stand beside each other. Where the length changes, what is left of the
window that was begun comes first, in rows of the new length, neighbours of the text joined; the other units have not been touched. So
nothing comes twice in an epoch and nothing is lost, wherever the change falls, and no sample depends on a change that comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from surefoot.core.hashing import key64
from surefoot.data.order import FeistelPermutation

WINDOW_UNITS: Final = 4096

I64Array = npt.NDArray[np.int64]
Span = tuple[int, int]
"""(first token in the stream of the source, number of tokens)"""


class Places(NamedTuple):
    """Where samples lie: arrays (B,), int64. `starts` is the first token, -1 where a sample is put together from several spans."""

    epochs: I64Array
    starts: I64Array


@dataclass(frozen=True, slots=True)
class Source:
    """What fixes the order of one source. `num_units` of `unit_tokens` each; the last `num_reserve` of an epoch are kept back."""

    name: str
    num_units: int
    unit_tokens: int
    seed: int
    restart: int = 0
    num_reserve: int = 0

    @property
    def num_regular(self) -> int:
        return self.num_units - self.num_reserve

    def permutation(self, epoch: int) -> FeistelPermutation:
        return _permutation(self.num_units, key64(self.seed, self.name, epoch, "order", self.restart))

    def window(self, epoch: int, *, base: int, seq_len: int, size: int) -> FeistelPermutation:
        return _permutation(size, key64(self.seed, self.name, epoch, "window", self.restart, base, seq_len))


@dataclass(frozen=True)
class Era:
    """A source while its sequences have one length: from its `first`-th sample on, in `epoch`, with `unit` units of it used up before.

    `left_over` are spans of the epoch that an era before has opened and not used; they come first.
    """

    source: Source
    first: int
    seq_len: int
    epoch: int = 0
    unit: int = 0
    left_over: tuple[Span, ...] = ()

    @property
    def pieces_per_unit(self) -> int:
        return self.source.unit_tokens // self.seq_len

    @cached_property
    def num_left_rows(self) -> int:
        return -(-sum(length for _, length in self.left_over) // self.seq_len)

    @property
    def num_of_first_epoch(self) -> int:
        """Samples until the epoch ends in which this era begins."""
        return self.num_left_rows + (self.source.num_regular - self.unit) * self.pieces_per_unit

    @property
    def num_of_epoch(self) -> int:
        return self.source.num_regular * self.pieces_per_unit

    def num_until(self, epoch: int) -> int:
        """Samples of this era before `epoch` begins: what it has to give when no epoch from there on may be read."""
        return max(0, self.num_of_first_epoch + (epoch - self.epoch - 1) * self.num_of_epoch) if epoch > self.epoch else 0

    def at(self, numbers: I64Array) -> Places:
        """Where the samples of this era lie that are `numbers` after its first."""
        epochs, starts = np.full_like(numbers, self.epoch), np.full_like(numbers, -1)
        for epoch, base, rows, pieces in self._by_epoch(numbers):
            epochs[rows] = epoch
            starts[rows] = self._starts(pieces, epoch=epoch, base=base)
        return Places(epochs, starts)

    def spans(self, number: int) -> tuple[Span, ...]:
        """The spans of one sample; together `seq_len` tokens, fewer for the last row of what was left over."""
        if number >= self.num_left_rows:
            return ((int(self.at(np.array([number])).starts[0]), self.seq_len),)
        return self._left_row(int(self._left_order.forward([number])[0]))

    def numbers_of(self, start: int, end: int, *, epoch: int) -> I64Array:
        """Which samples of this era hold a token of [start, end) in `epoch`, as numbers after its first. Sorted."""
        if epoch < self.epoch:
            return np.empty(0, dtype=np.int64)
        found = [self._left_rows_of(start, end)] if epoch == self.epoch else []
        first_piece, end_piece = start // self.seq_len, -(-end // self.seq_len)
        pieces = np.arange(first_piece, min(end_piece, self.source.num_units * self.pieces_per_unit), dtype=np.int64)
        units, within = np.divmod(pieces, self.pieces_per_unit)
        found.append(self.numbers_at(self.source.permutation(epoch).inverse(units).astype(np.int64), within, epoch=epoch))
        return np.unique(np.concatenate(found))

    def numbers_at(self, positions: I64Array, within: I64Array, *, epoch: int) -> I64Array:
        """The numbers of piece `within` of the units at `positions` of the epoch's order; those of the reserve or used up before lack."""
        base = self.unit if epoch == self.epoch else 0
        here = (positions >= base) & (positions < self.source.num_regular)
        positions, within = positions[here], within[here]
        before = self.num_left_rows if epoch == self.epoch else self.num_until(epoch)
        if self.pieces_per_unit == 1:
            return before + positions - base
        numbers = np.empty_like(positions)
        windows = (positions - base) // WINDOW_UNITS
        for window in np.unique(windows).tolist():
            mine = windows == window
            first, size = self._window(window, base=base)
            image = (positions[mine] - first) * self.pieces_per_unit + within[mine]
            order = self.source.window(epoch, base=first, seq_len=self.seq_len, size=size)
            numbers[mine] = (first - base) * self.pieces_per_unit + order.inverse(image).astype(np.int64)
        return before + numbers

    def after(self, count: int, *, seq_len: int) -> Era:
        """The era that follows when this one has given `count` samples and sequences get another length."""
        first = self.first + count
        if count < self.num_left_rows:
            rows = self._left_order.forward(np.arange(count, self.num_left_rows)).tolist()
            left = _merged([span for row in rows for span in self._left_row(row)])
            return Era(self.source, first, seq_len, self.epoch, self.unit, left)
        epoch, base, piece = self._piece_of(count)
        if self.pieces_per_unit == 1:
            return Era(self.source, first, seq_len, epoch, base + piece)
        window = piece // (WINDOW_UNITS * self.pieces_per_unit)
        begin, size = self._window(window, base=base)
        done = piece - (begin - base) * self.pieces_per_unit
        if not done:
            return Era(self.source, first, seq_len, epoch, begin)
        left_pieces = np.arange(piece, (begin - base) * self.pieces_per_unit + size, dtype=np.int64)
        starts = np.sort(self._starts(left_pieces, epoch=epoch, base=base))
        end = begin + size // self.pieces_per_unit
        return Era(self.source, first, seq_len, epoch, end, _joined(starts, self.seq_len))

    def epochs_by(self, number: int) -> float:
        """How often the source has been read through before the sample `number`, by tokens."""
        epoch = self.epoch_of(number)
        left = self.num_until(epoch + 1) - number
        return epoch + 1 - left * self.seq_len / max(1, self.source.num_regular * self.source.unit_tokens)

    def epoch_of(self, number: int) -> int:
        return self.epoch if number < self.num_left_rows else self._piece_of(number)[0]

    def _piece_of(self, number: int) -> tuple[int, int, int]:
        """(epoch, units used up before, piece counted from there) of the sample `number`, which is no row of what was left over."""
        if number < self.num_of_first_epoch:
            return self.epoch, self.unit, number - self.num_left_rows
        epochs, piece = divmod(number - self.num_of_first_epoch, self.num_of_epoch)
        return self.epoch + 1 + epochs, 0, piece

    def _by_epoch(self, numbers: I64Array) -> list[tuple[int, int, npt.NDArray[np.bool_], I64Array]]:
        """(epoch, units used up before, which of `numbers`, their pieces counted from there), rows of what was left over aside."""
        later = numbers >= self.num_of_first_epoch
        own = ~later & (numbers >= self.num_left_rows)
        found = [(self.epoch, self.unit, own, numbers[own] - self.num_left_rows)] if own.any() else []
        if later.any():
            epochs = (numbers - self.num_of_first_epoch) // self.num_of_epoch
            for epoch in np.unique(epochs[later]).tolist():
                rows = later & (epochs == epoch)
                found.append((self.epoch + 1 + epoch, 0, rows, (numbers[rows] - self.num_of_first_epoch) % self.num_of_epoch))
        return found

    def _starts(self, pieces: I64Array, *, epoch: int, base: int) -> I64Array:
        order = self.source.permutation(epoch)
        if self.pieces_per_unit == 1:
            return order.forward(base + pieces).astype(np.int64) * self.seq_len
        starts = np.empty_like(pieces)
        windows = pieces // (WINDOW_UNITS * self.pieces_per_unit)
        for window in np.unique(windows).tolist():
            mine = windows == window
            first, size = self._window(window, base=base)
            shuffle = self.source.window(epoch, base=first, seq_len=self.seq_len, size=size)
            images = shuffle.forward(pieces[mine] - (first - base) * self.pieces_per_unit).astype(np.int64)
            units, within = np.divmod(images, self.pieces_per_unit)
            starts[mine] = order.forward(first + units).astype(np.int64) * self.source.unit_tokens + within * self.seq_len
        return starts

    def _window(self, window: int, *, base: int) -> tuple[int, int]:
        """(first unit, pieces) of a window; the last one of an epoch may be short."""
        first = base + window * WINDOW_UNITS
        return first, max(0, min(WINDOW_UNITS, self.source.num_regular - first)) * self.pieces_per_unit

    @cached_property
    def _left_order(self) -> FeistelPermutation:
        """The rows of what was left over are shuffled too: in the order of the text a batch would hold one text."""
        source = self.source
        key = key64(source.seed, source.name, self.epoch, "left", source.restart, self.unit, self.first, self.seq_len)
        return _permutation(max(1, self.num_left_rows), key)

    def _left_row(self, row: int) -> tuple[Span, ...]:
        """The spans of row `row` of what was left over, in the order of the text."""
        first = row * self.seq_len
        place = max(0, int(np.searchsorted(self._left_ends, first, side="right")))
        before = int(self._left_ends[place - 1]) if place else 0
        spans, want = [], self.seq_len
        for start, length in self.left_over[place:]:
            skip = max(0, first - before)
            here = min(want, length - skip)
            spans.append((start + skip, here))
            want -= here
            before += length
            if not want:
                break
        return tuple(spans)

    @cached_property
    def _left_ends(self) -> I64Array:
        return np.cumsum(np.array([length for _, length in self.left_over], dtype=np.int64))

    def _left_rows_of(self, start: int, end: int) -> I64Array:
        rows: list[int] = []
        before = 0
        for first, length in self.left_over:
            low, high = max(start, first), min(end, first + length)
            if low < high:
                rows += range((before + low - first) // self.seq_len, (before + high - first - 1) // self.seq_len + 1)
            before += length
        return self._left_order.inverse(np.array(rows, dtype=np.int64)).astype(np.int64) if rows else np.empty(0, dtype=np.int64)


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """`spans` in the order of the text, neighbours joined."""
    merged: list[Span] = []
    for start, length in sorted(spans):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


def _joined(starts: I64Array, length: int) -> tuple[Span, ...]:
    """Sorted pieces of one length as spans, neighbours joined."""
    breaks = np.flatnonzero(np.diff(starts) != length) + 1
    firsts = starts[np.concatenate([np.zeros(1, dtype=np.int64), breaks])]
    counts = np.diff(np.concatenate([np.zeros(1, dtype=np.int64), breaks, np.array([starts.size])]))
    return tuple(zip(firsts.tolist(), (counts * length).tolist(), strict=True))


@lru_cache(maxsize=256)
def _permutation(size: int, key: int) -> FeistelPermutation:
    return FeistelPermutation(size, key=key)
