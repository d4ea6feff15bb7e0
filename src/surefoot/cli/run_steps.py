"""Which samples each step of a run took or will take: by the record where there is one, by arithmetic where the run has yet to come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import ParallelSection
from surefoot.data.steps import StepPlan

I64Array = npt.NDArray[np.int64]

_DECIDES_STEPS: Final = "train"
"""The section that says how many samples a step takes: where it was changed under way, steps may not be those of the config now."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of the run, which began after `base_step` finished steps, the layout it ran under, and the identity of its data.

    None and "" where the ledger has none.
    """

    number: int
    base_step: int
    parallel: ParallelSection | None
    data_hash: str = ""


@dataclass(frozen=True, slots=True)
class StepSamples:
    """One step: its global samples in the order of its slots, whether the present line of the run has done it, by which attempt, and the
    layout and data of that; without one those of the run now, "" for its data.
    """

    step: int
    samples: I64Array
    seen: bool
    attempt: int | None
    parallel: ParallelSection
    data_hash: str = ""


class RunSteps:
    """The steps of one run, as its ledger and its metrics tell them and `plan` goes on. `start` is (finished steps, next sample) of the
    checkpoint that the newest attempt began from, for a run that has no row yet.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        plan: StepPlan,
        entries: Sequence[LedgerEntry],
        parallel: ParallelSection,
        num_steps: int,
        start: tuple[int, int],
    ) -> None:
        self.num_steps = num_steps
        self._run_dir, self._plan, self._parallel, self._start = run_dir, plan, parallel, start
        self._attempts = attempts_of(entries)
        self._ledger_step = max((entry.step for entry in entries), default=0)
        self._was_changed = any(entry.event == Event.CONFIG_ACCEPTED and entry.fields.get("section") == _DECIDES_STEPS for entry in entries)

    @cached_property
    def newest(self) -> tuple[int, int]:
        """(finished steps, next sample) of the present line."""
        rows = on_line(_rows(self._run_dir, newest=1), self._attempts)  # those before it are of older attempts or steps
        return max([self._start, *((int(row["step"]), int(row["next_sample"])) for row in rows)])

    def has_made(self, step: int) -> bool:
        """Whether the run has done `step` at some time, be it one that it has gone back from since."""
        return 1 <= step <= max(self.newest[0], self._ledger_step) or (
            step >= 1 and bool(_rows(self._run_dir, steps=range(step, step + 1)))
        )

    @property
    def end_sample(self) -> int:
        """The first sample that no step of the run takes."""
        return int(self.planned(self.num_steps).samples[-1]) + 1

    def of_step(self, step: int) -> StepSamples:
        """What `step` took by the record, or will take. Raises ConfigError for a step that the run does not have."""
        if not 1 <= step <= self.num_steps:
            hint = f"it has steps 1 to {self.num_steps}"
            raise ConfigError(f"the run has no step {step}", where="--step", hint=hint, got=step, limit=self.num_steps)
        planned = self.planned(step)
        return replace(planned, samples=self._recorded(step)) if planned.seen else planned

    def planned(self, step: int) -> StepSamples:
        """The same without a look at the record of this step: for many of them."""
        samples = self._plan.samples(self._first_of(step))
        if step > self.newest[0]:
            return StepSamples(step, samples, seen=False, attempt=None, parallel=self._parallel)
        attempt = attempt_of(step, self._attempts) or Attempt(0, 0, None)
        parallel = attempt.parallel or self._parallel
        return StepSamples(step, samples, seen=True, attempt=attempt.number or None, parallel=parallel, data_hash=attempt.data_hash)

    def fits(self, first: int, end: int) -> bool:
        """Whether a step that begins at sample `first` ends before `end`, by the plan of now."""
        return self._behind(int(self._plan.samples(first)[-1]) + 1) == self._behind(end)

    def taking(self, samples: I64Array) -> list[int]:
        """The step that takes each of `samples`, none of which is skipped."""
        if self._follows_plan:
            return [self._plan.step_at(sample) + 1 for sample in samples.tolist()]
        steps: list[int] = np.searchsorted(self._firsts, samples, side="right").tolist()
        return steps

    def _recorded(self, step: int) -> I64Array:
        """What a finished step took. The record wins over the plan: the batch may have been another then."""
        rows = {
            int(row["step"]): int(row["next_sample"])
            for row in on_line(_rows(self._run_dir, steps=range(step - 1, step + 1)), self._attempts)
        }
        first = 0 if step == 1 else rows.get(step - 1)
        first = self._first_of(step) if first is None else first
        samples = self._plan.samples(first)
        end = rows.get(step, int(samples[-1]) + 1)
        if self._behind(int(samples[-1]) + 1) == self._behind(end):
            return samples
        return self._plan.without_skipped(np.arange(first, end, dtype=np.int64))

    def _behind(self, sample: int) -> int:
        """The first sample from `sample` on that is not skipped: a record may say where a skipped range begins, or where it ends."""
        return int(self._plan.samples(sample)[0])

    def _first_of(self, step: int) -> int:
        return self._plan.span(step - 1)[0] if self._follows_plan else int(self._firsts[step - 1])

    @cached_property
    def _follows_plan(self) -> bool:
        """Whether all steps so far are those of the config as it is now. It can only have been another between two attempts."""
        ends = dict([self.newest])
        if self._was_changed:
            bases = {attempt.base_step for attempt in self._attempts}
            ends |= {step: next_sample for step, next_sample in self._line.items() if step in bases}
        return all(self._behind(next_sample) == self._plan.span(step)[0] for step, next_sample in ends.items())

    @cached_property
    def _line(self) -> dict[int, int]:
        """Where each recorded step of the present line ends."""
        return {int(row["step"]): int(row["next_sample"]) for row in on_line(_rows(self._run_dir), self._attempts)}

    @cached_property
    def _firsts(self) -> I64Array:
        """The first sample of every step: recorded ones, then one after the other. For a run whose batch was changed under way."""
        finished, next_sample = self.newest
        firsts = [0]
        for step in range(1, finished):
            firsts.append(self._line.get(step, firsts[-1]))
        firsts += [next_sample] if finished else []
        while len(firsts) < self.num_steps:
            firsts.append(int(self._plan.samples(firsts[-1])[-1]) + 1)
        return np.array(firsts, dtype=np.int64)


def attempts_of(entries: Iterable[LedgerEntry]) -> tuple[Attempt, ...]:
    """The attempts of a run, oldest first."""
    found: list[Attempt] = []
    for entry in entries:
        if entry.event == Event.ATTEMPT_STARTED:
            found.append(
                Attempt(entry.attempt, entry.step, _layout(entry.fields.get("topology")), str(entry.fields.get("data_hash") or ""))
            )
        elif entry.event == Event.RUN_ROLLED_BACK and found:
            found.append(replace(found[-1], number=entry.attempt, base_step=entry.step))
    return tuple(found)


def attempt_of(step: int, attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt whose `step` counts: the last one that began before it. Those before it did that step for a branch that was given up."""
    return next((attempt for attempt in reversed(attempts) if attempt.base_step < step), None)


def on_line(rows: Iterable[Mapping[str, Any]], attempts: Sequence[Attempt]) -> list[Mapping[str, Any]]:
    """The rows of steps that the present state of the run descends from."""
    return [row for row in rows if (attempt := attempt_of(int(row["step"]), attempts)) is not None and attempt.number == row["attempt"]]


def _layout(told: object) -> ParallelSection | None:
    if not isinstance(told, Mapping):
        return None
    known = {field.name for field in fields(ParallelSection)}
    return ParallelSection(**{name: value for name, value in told.items() if name in known})


def _rows(run_dir: Path, *, newest: int | None = None, steps: range | None = None) -> list[dict[str, Any]]:
    from surefoot.observe.metrics import read_steps

    table = read_steps(run_dir, newest=newest, steps=steps, columns=("next_sample",)).select(["step", "attempt", "next_sample"])
    rows: list[dict[str, Any]] = table.slice(max(0, table.num_rows - newest) if newest else 0).to_pylist()
    return rows
