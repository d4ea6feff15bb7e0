"""The stretches of a run that follow one mixture: how stages, exhausted sources and restarts cut the order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError
from surefoot.core.hashing import key64
from surefoot.core.sections import SourceSection
from surefoot.core.stages import Stage
from surefoot.data.mixture import Mixture, integer_weights
from surefoot.data.packing import num_samples_in
from surefoot.data.source_order import Era, Source

I64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Restart:
    """From which global sample a source was started anew on other data, and how often it has been."""

    first_sample: int = 0
    restart: int = 0


@dataclass(frozen=True)
class Recipe:
    """What a person asked of the order. `unit_tokens` is the longest sequence that it will ever be asked for.

    `begun_weights` are those that a run began with: where the config names none they hold, whatever size its sources have by now.
    """

    seed: int
    stages: tuple[Stage, ...]
    policies: Mapping[str, SourceSection]
    unit_tokens: int
    reserve_fraction: float = 0.0
    begun_weights: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, Restart] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """Samples from `first` on that follow one mixture. `given` is what each source gave before, `eras` how each goes on."""

    first: int
    seq_len: int
    mixture: Mixture
    given: I64Array
    eras: tuple[Era, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A stage that changes the order: integer weights in the order of the sources. One that changes only rates or batches is none."""

    first: int
    seq_len: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """All stretches of a run in their order. The order ends at `ends_at` because `ended_by` is used up, or never."""

    all: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    ends_at: int | None = None
    ended_by: str = ""


class Walk:
    """Goes through the stages once, carrying over what every source has given, and notes each stretch."""

    def __init__(self, recipe: Recipe, sources: Sequence[Source]) -> None:
        self._recipe = recipe
        self._sources = sources
        self._ends: tuple[int, str] | None = None

    def segments(self) -> Segments:
        """Raises DataError for a stage that names a source which the data does not hold."""
        given = np.zeros(len(self._sources), dtype=np.int64)
        eras = [Era(source, 0, self._recipe.stages[0].seq_len) for source in self._sources]
        turns = self._turns()
        edges = {turn.first for turn in turns} | {start.first_sample for start in self._recipe.restarts.values()}
        ordered = sorted(edges | {0})
        found: list[Segment] = []
        for first, end in zip(ordered, [*ordered[1:], None], strict=True):
            turn = [turn for turn in turns if turn.first <= first][-1]
            self._start_anew(given, eras, at=first, seq_len=turn.seq_len)
            given = self._stretches(turn, (first, end), given, eras, found)
            if self._ends is not None:
                break
        if not found:
            found.append(self._segment(0, turns[0], turns[0].weights, given, eras))
        return Segments(tuple(found), turns, *(self._ends or ()))

    def _turns(self) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        for stage in self._recipe.stages:
            turn = Turn(stage.first_sample, stage.seq_len, self._weights_of(stage))
            if not turns or (turn.seq_len, turn.weights) != (turns[-1].seq_len, turns[-1].weights):
                turns.append(turn)
        return tuple(turns)

    def _start_anew(self, given: I64Array, eras: list[Era], *, at: int, seq_len: int) -> None:
        for number, source in enumerate(self._sources):
            if at and self._recipe.restarts.get(source.name, Restart()).first_sample == at:
                eras[number], given[number] = Era(source, 0, seq_len), 0

    def _stretches(self, turn: Turn, span: tuple[int, int | None], given: I64Array, eras: list[Era], found: list[Segment]) -> I64Array:
        """Append what `turn` is cut into by sources that are used up in it; returns what every source has given at its end."""
        first, end = span
        weights = turn.weights
        while end is None or first < end:
            for number, weight in enumerate(weights):
                if weight and eras[number].seq_len != turn.seq_len:
                    eras[number] = eras[number].after(int(given[number]) - eras[number].first, seq_len=turn.seq_len)
            weights = self._without_exhausted(weights, eras, given, at=first)
            if self._ends is not None:
                break
            segment = self._segment(first, turn, weights, given, eras)
            found.append(segment)
            stops = [stop for stop in (self._first_exhausted(segment), end) if stop is not None]
            if not stops:
                break
            given = segment.given + segment.mixture.counts(min(stops) - first)
            first = min(stops)
        return given

    def _segment(self, first: int, turn: Turn, weights: Sequence[int], given: I64Array, eras: Sequence[Era]) -> Segment:
        mixture = Mixture(weights, key=key64(self._recipe.seed, "mixture", first))
        return Segment(first=first, seq_len=turn.seq_len, mixture=mixture, given=given.copy(), eras=tuple(eras))

    def _weights_of(self, stage: Stage) -> tuple[int, ...]:
        """By the order of the sources. Where the config names none, each gives in proportion to what it holds."""
        asked = dict(stage.weights)
        names = [source.name for source in self._sources]
        unknown = sorted(set(asked) - set(names))
        where = "[[data.sources]]" if not stage.first_sample else f"[[stage]] at sample {stage.first_sample}"
        if unknown:
            hint = f"the prepared data holds {', '.join(names)}: name sources as when they were prepared, or prepare them"
            raise DataError(f"no source {', '.join(map(repr, unknown))} in the prepared data", where=where, hint=hint)
        begun = {name: float(self._recipe.begun_weights.get(name, 0)) for name in names}
        sizes = begun if any(begun.values()) else {source.name: float(source.num_regular) for source in self._sources}
        shares = {name: asked.get(name, 0.0) for name in names} if asked else sizes
        return integer_weights(shares, where=where)

    def _without_exhausted(self, weights: Sequence[int], eras: Sequence[Era], given: I64Array, *, at: int) -> tuple[int, ...]:
        """`weights` without the sources that have nothing left; notes where the order ends."""
        left = list(weights)
        for number, source in enumerate(self._sources):
            if weights[number] and self._left(number, eras[number], int(given[number])) == 0:
                if self._policy(source.name).exhaustion == "stop":
                    self._ends = (at, source.name)
                left[number] = 0
        if not any(left) and self._ends is None:
            self._ends = (at, "all sources")
        return tuple(left)

    def _first_exhausted(self, segment: Segment) -> int | None:
        """The first global sample of the segment that some source cannot give."""
        firsts = []
        for number, weight in enumerate(segment.mixture.weights.tolist()):
            left = self._left(number, segment.eras[number], int(segment.given[number])) if weight else None
            if left is not None:
                firsts.append(segment.first + int(segment.mixture.offset_of(number, left)[0]))
        return min(firsts, default=None)

    def _left(self, number: int, era: Era, given: int) -> int | None:
        """Samples that the source may still give; None without a limit."""
        policy = self._policy(self._sources[number].name)
        max_epochs = policy.max_epochs or (0 if policy.exhaustion == "repeat" else 1)
        if not max_epochs:
            return None
        return max(0, era.num_until(max_epochs) - (given - era.first))

    def _policy(self, name: str) -> SourceSection:
        return self._recipe.policies.get(name, SourceSection(name=name))


def source_of(name: str, *, num_tokens: int, recipe: Recipe) -> Source:
    """What fixes the order of a source of so many tokens. Raises DataError when it is too short for one sample."""
    unit = recipe.unit_tokens
    num_units = num_samples_in(num_tokens, seq_len=unit)
    num_reserve = min(max(0, num_units - 1), ceil(num_units * Fraction(str(recipe.reserve_fraction))))
    if num_units < 1:
        raise DataError(
            f"{num_tokens} tokens hold no sample of {unit + 1}",
            where=f"source {name!r}",
            hint="lower [data] seq_len, or replace the prepared data by more text with `surefoot data prepare ... --force`",
            got=num_tokens,
            wanted=unit + 1,
        )
    restart = recipe.restarts.get(name, Restart()).restart
    return Source(name, num_units, unit, recipe.seed, restart, num_reserve)
