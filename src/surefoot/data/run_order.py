"""The order of a whole run: which tokens global sample g holds, and when a token comes. Arithmetic over manifest, config and blocklist.

Stages follow each other at any sample. What each source has given so far is carried over, so a change of the mixture repeats and loses
nothing. A source that is used up takes its policy: it is read again under another key, its share goes to the others, or the order ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import Block
from surefoot.core.errors import DataError
from surefoot.data.reserve import Replacements
from surefoot.data.segments import Recipe, Restart, Segment, Walk, source_of
from surefoot.data.source_order import Span
from surefoot.data.steps import StepPlan

I64Array = npt.NDArray[np.int64]

_CHUNK: Final = 1024  # samples whose places are computed at once


@dataclass(frozen=True, slots=True)
class Sample:
    """One global sample. `index` is its number within its source, by its first token; `spans` are (first token in the stream, tokens)."""

    sample: int
    source: str
    epoch: int
    index: int
    spans: tuple[Span, ...]
    seq_len: int


class Rows(NamedTuple):
    """Where global samples of one length lie: arrays (B,), int64. `starts` is -1 where a sample is put together from several spans."""

    sources: I64Array
    epochs: I64Array
    starts: I64Array


class RunOrder:
    """The samples of a run. Opens no file. `steps` says which samples each step takes.

    `ends_at` is the first sample that cannot be drawn, because `ended_by` was used up; None when the order goes on for ever.
    """

    def __init__(self, recipe: Recipe, *, tokens: Mapping[str, int], steps: StepPlan, blocks: Sequence[Block] = ()) -> None:
        """`tokens` are the tokens of the train stream of each source, in the manifest's order."""
        self.recipe = recipe
        self.steps = steps
        self.names = tuple(tokens)
        self.sources = tuple(source_of(name, num_tokens=count, recipe=recipe) for name, count in tokens.items())
        self.segments = Walk(recipe, self.sources).segments()
        self.ends_at, self.ended_by = self.segments.ends_at, self.segments.ended_by
        self._firsts = [segment.first for segment in self.segments.all]
        self._chunk = lru_cache(maxsize=8)(self._one_chunk)
        self._replacements = tuple(Replacements(source, blocks) for source in self.sources)

    # What is at a sample

    def rows(self, samples: I64Array) -> Rows:
        """Where `samples` lie. Raises DataError behind the end, and where a source had other data then.

        Neighbours are computed together and kept for a while: 32 at a time cost twenty times as much for each.
        """
        self._refuse_end(samples)
        if not samples.size or int(samples.min()) // _CHUNK != int(samples.max()) // _CHUNK:
            return self._rows(samples)
        chunk = self._chunk(int(samples[0]) // _CHUNK)
        if chunk is None:
            return self._rows(samples)
        first, rows = chunk
        return Rows(*(column[samples - first] for column in rows))

    def _one_chunk(self, number: int) -> tuple[int, Rows] | None:
        """(first sample, rows) of a stretch of samples; None where not all of them can be drawn."""
        first, end = number * _CHUNK, (number + 1) * _CHUNK
        if first < self.known_from() or (self.ends_at is not None and end > self.ends_at):
            return None
        return first, self._rows(np.arange(first, end, dtype=np.int64))

    def _rows(self, samples: I64Array) -> Rows:
        out = Rows(*(np.empty_like(samples) for _ in Rows._fields))
        which = np.searchsorted(np.array(self._firsts, dtype=np.int64), samples, side="right") - 1
        for number in np.unique(which).tolist():
            here = np.flatnonzero(which == number)
            segment = self.segments.all[number]
            sources, counts = segment.mixture.at(samples[here] - segment.first)
            out.sources[here] = sources
            for source in np.unique(sources).tolist():
                mine = sources == source
                era = segment.eras[source]
                self._refuse_lost(source, int(samples[here[mine]].min()))
                places = era.at(segment.given[source] + counts[mine] - era.first)
                out.epochs[here[mine]] = places.epochs
                out.starts[here[mine]] = self._with_reserve(source, places.starts, places.epochs, segment.seq_len, samples[here[mine]])
        return out

    def at(self, samples: npt.ArrayLike) -> list[Sample]:
        """The given global samples, whatever their lengths."""
        wanted = np.atleast_1d(np.asarray(samples, dtype=np.int64))
        sources, epochs, starts = self.rows(wanted)
        found = []
        for row, sample in enumerate(wanted.tolist()):
            seq_len, source = self.seq_len_at(sample), int(sources[row])
            spans = ((int(starts[row]), seq_len),) if starts[row] >= 0 else self.spans_at(sample)
            found.append(Sample(sample, self.names[source], int(epochs[row]), spans[0][0] // seq_len, spans, seq_len))
        return found

    def spans_at(self, sample: int) -> tuple[Span, ...]:
        """The spans of a sample that is put together from several; fewer than its tokens where nothing more was left over."""
        segment = self._segment_at(sample)
        sources, counts = segment.mixture.at(sample - segment.first)
        era = segment.eras[int(sources[0])]
        return era.spans(int(segment.given[sources[0]] + counts[0]) - era.first)

    def seq_len_at(self, sample: int) -> int:
        return self._segment_at(sample).seq_len

    # When a token comes

    def holding(self, source: str, start: int, end: int, *, first: int = 0, until: int) -> I64Array:
        """The global samples of [first, until) that hold a token of [start, end) of the stream of `source`. Sorted."""
        number = self.names.index(source)
        until = min(until, self.ends_at) if self.ends_at is not None else until
        first = max(first, self._known_from(number))
        found = [np.empty(0, dtype=np.int64)]
        for position, segment in enumerate(self.segments.all):
            segment_end = self._firsts[position + 1] if position + 1 < len(self._firsts) else until
            low, high = max(first, segment.first), min(until, segment_end)
            if low < high and segment.mixture.weights[number]:
                found.append(self._holding(segment, number, (start, end), low, high))
        samples = np.unique(np.concatenate(found))
        return self._really_holding(samples, source, start, end) if self._replacements[number] else samples

    # Totals

    def given(self, sample: int) -> dict[str, int]:
        """How many samples each source gives before global `sample`, since it was started."""
        segment = self._segment_at(max(0, sample))
        return dict(zip(self.names, (segment.given + segment.mixture.counts(sample - segment.first)).tolist(), strict=True))

    def place_of(self, source: str, sample: int) -> tuple[int, int]:
        """(epoch, samples given in it since it began or since the sequence length changed) of `source` before global `sample`."""
        number = self.names.index(source)
        era = self._segment_at(sample).eras[number]
        count = self.given(sample)[source] - era.first
        epoch = era.epoch_of(count)
        return epoch, count - era.num_until(epoch)

    def epochs_by(self, sample: int) -> dict[str, float]:
        """How often each source has been read through before global `sample`."""
        segment = self._segment_at(sample)
        given = self.given(sample)
        return {name: era.epochs_by(given[name] - era.first) for name, era in zip(self.names, segment.eras, strict=True)}

    def planned_shares(self, sample: int) -> dict[str, float]:
        """The shares in force at `sample`, with what exhausted sources no longer give dealt out."""
        mixture = self._segment_at(sample).mixture
        return dict(zip(self.names, (mixture.weights / mixture.period).tolist(), strict=True))

    def tokens_before(self, sample: int) -> int:
        """Tokens of all samples before global `sample`, skipped ones left out."""
        total = 0
        for first, end, sign in ((0, sample, 1), *((first, min(end, sample), -1) for first, end in self.steps.skipped)):
            for position, segment in enumerate(self.segments.all):
                last = self._firsts[position + 1] if position + 1 < len(self._firsts) else max(end, segment.first)
                total += sign * segment.seq_len * max(0, min(end, last) - max(first, segment.first))
        return total

    def known_from(self) -> int:
        """The first global sample from which every source has the data that it has now."""
        return max((start.first_sample for start in self.recipe.restarts.values()), default=0)

    def step_samples(self, first_sample: int) -> I64Array:
        """The samples of the step that begins at `first_sample`."""
        return self.steps.samples(first_sample)

    def step_at(self, sample: int) -> int:
        """How many steps of this plan are finished before the one that takes `sample`."""
        return self.steps.step_at(sample)

    def _segment_at(self, sample: int) -> Segment:
        return self.segments.all[max(0, bisect_right(self._firsts, sample) - 1)]

    def _holding(self, segment: Segment, number: int, tokens: tuple[int, int], low: int, high: int) -> I64Array:
        era, before = segment.eras[number], int(segment.given[number])
        begin = before + int(segment.mixture.counts(low - segment.first)[number])
        end = before + int(segment.mixture.counts(high - segment.first)[number])
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        numbers = []
        for epoch in range(era.epoch_of(begin - era.first), era.epoch_of(end - 1 - era.first) + 1):
            numbers.append(era.numbers_of(*tokens, epoch=epoch))
            for unit in self._replacements[number].replaced_by(*tokens, epoch=epoch).tolist() if self._replacements[number] else ():
                size = self.sources[number].unit_tokens
                numbers.append(era.numbers_of(unit * size, (unit + 1) * size, epoch=epoch))
        counts = np.concatenate(numbers) + era.first
        counts = counts[(counts >= begin) & (counts < end)] - before
        return segment.first + segment.mixture.offset_of(number, counts)

    def _really_holding(self, samples: I64Array, source: str, start: int, end: int) -> I64Array:
        """Those of `samples` that hold a token of [start, end) with the reserve in its place."""
        held = [
            sample.sample
            for sample in self.at(samples)
            if sample.source == source and any(first < end and first + count > start for first, count in sample.spans)
        ]
        return np.array(held, dtype=np.int64)

    def _with_reserve(self, number: int, starts: I64Array, epochs: I64Array, seq_len: int, samples: I64Array) -> I64Array:
        replacements = self._replacements[number]
        if not replacements:
            return starts
        starts = starts.copy()
        for epoch in np.unique(epochs).tolist():
            mine = (epochs == epoch) & (starts >= 0)
            starts[mine] = replacements.apply(starts[mine], seq_len, epoch=epoch, samples=samples[mine])
        return starts

    def _refuse_end(self, samples: I64Array) -> None:
        if samples.size and int(samples.min()) < 0:
            raise ValueError(f"global sample {int(samples.min())}: they count from 0")
        if self.ends_at is not None and samples.size and int(samples.max()) >= self.ends_at:
            what = f"sample {int(samples.max())} cannot be drawn: {self.ended_by} used up at sample {self.ends_at}"
            raise DataError(what, where="[[data.sources]]", hint="train fewer steps, add text, or set another exhaustion for the source")

    def _known_from(self, number: int) -> int:
        return self.recipe.restarts.get(self.names[number], Restart()).first_sample

    def _refuse_lost(self, number: int, sample: int) -> None:
        if sample < self._known_from(number):
            what = f"sample {sample} came from data that source {self.names[number]!r} no longer has"
            hint = f"the source was started anew at sample {self._known_from(number)}; give back the old data to look further back"
            raise DataError(what, where="data", hint=hint)
