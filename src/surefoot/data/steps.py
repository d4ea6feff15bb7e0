"""How many samples each step takes, and which: ramps of the batch, edges of stages, ranges that are skipped. Pure arithmetic.

A step takes the next samples that are not skipped. It ends early at an edge behind which samples have another shape. An entry of the ramp
takes effect at the first step that begins at or after its sample, so a step never changes size half-way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import ConfigError

I64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Run:
    """`num_steps` equal steps of `batch` samples (None: without end), the first of them step number `step` at `sample`."""

    step: int
    sample: int
    batch: int
    num_steps: int | None


class StepPlan:
    """A table of (first_sample, batch) that ends in `global_batch_size`; without one every step takes that.

    `later` are further (first_sample, batch) of stages, `edges` the samples at which a step ends early, `skipped` the ranges [first, end)
    of samples that no step takes.
    """

    def __init__(
        self,
        ramp: Sequence[tuple[int, int]] = (),
        *,
        global_batch_size: int,
        later: Sequence[tuple[int, int]] = (),
        edges: Sequence[int] = (),
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        check_ramp(ramp, global_batch_size=global_batch_size)
        entries = [(int(first), int(batch)) for first, batch in ramp] or [(0, global_batch_size)]
        for first, batch in sorted(later):
            entries = [entry for entry in entries if entry[0] < first] + [(first, batch)]  # a stage's word ends a ramp that goes on
        self._starts, self._batches = [first for first, _ in entries], [batch for _, batch in entries]
        self._edges = sorted(edges)
        self._skipped = _merged(skipped)
        self._skip_starts = [first for first, _ in self._skipped]
        self._runs = self._table()

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        return self._skipped

    def batch_at(self, first_sample: int) -> int:
        """The number of samples of a step that begins at `first_sample`. Needs no history: it holds after a change of the plan too."""
        return len(self.samples(first_sample))

    def samples(self, first_sample: int) -> I64Array:
        """The samples of the step that begins at `first_sample`, or behind the range that it is skipped with. Sorted."""
        first = self._behind_skips(first_sample)
        batch = self._batches[max(0, bisect_right(self._starts, first) - 1)]
        position = bisect_right(self._edges, first)
        end_of_shape = self._edges[position] if position < len(self._edges) else None
        parts = []
        while batch and (end_of_shape is None or first < end_of_shape):
            index = bisect_right(self._skip_starts, first)
            stops = [first + batch, *self._skip_starts[index : index + 1], *([end_of_shape] if end_of_shape is not None else [])]
            end = min(stops)
            parts.append(np.arange(first, end, dtype=np.int64))
            batch -= end - first
            first = self._behind_skips(end)
        return np.concatenate(parts)

    def without_skipped(self, samples: I64Array) -> I64Array:
        """Those of `samples` that some step takes."""
        for first, end in self._skipped:
            samples = samples[(samples < first) | (samples >= end)]
        return samples

    def span(self, step: int) -> tuple[int, int]:
        """(first_sample, num_samples) of the step that follows `step` finished steps of an unchanged plan."""
        run = next(run for run in reversed(self._runs) if run.step <= step)
        first = run.sample + (step - run.step) * run.batch
        return first, self.batch_at(first)

    def step_at(self, sample: int) -> int:
        """How many steps are finished before the one that takes `sample`, or before that which comes behind it when it is skipped."""
        run = next(run for run in reversed(self._runs) if run.sample <= sample or run.step == 0)
        within = max(0, sample - run.sample) // run.batch
        return run.step + (within if run.num_steps is None else min(within, run.num_steps - 1))

    def _behind_skips(self, sample: int) -> int:
        index = bisect_right(self._skip_starts, sample) - 1
        return max(sample, self._skipped[index][1]) if index >= 0 else sample

    def _table(self) -> list[_Run]:
        """Runs of equal steps: up to the next event as many as fit, then the one step that meets it."""
        events = sorted({*self._starts, *self._edges, *self._skip_starts})
        runs: list[_Run] = []
        step, sample = 0, self._behind_skips(0)
        for event in events:
            while sample < event:
                batch = self.batch_at(sample)
                count = max(1, (event - sample) // batch)
                runs.append(_Run(step, sample, batch, count))
                step += count
                sample = self._behind_skips(int(self.samples(sample + (count - 1) * batch)[-1]) + 1)
        runs.append(_Run(step, sample, self.batch_at(sample), None))
        return runs


def check_ramp(ramp: Sequence[tuple[int, int]], *, global_batch_size: int) -> None:
    """Raises ConfigError for a ramp that does not lead from sample 0 up to `global_batch_size`."""
    where = "[train] batch_ramp"
    starts = [first for first, _ in ramp]
    if global_batch_size < 1 or any(batch < 1 for _, batch in ramp):
        raise ConfigError("a batch of less than one sample", where=where, hint="every batch is at least 1")
    if ramp and starts[0] != 0:
        raise ConfigError(
            f"the first entry starts at sample {starts[0]}", where=where, hint="start it at 0, so that the first step has a size"
        )
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ConfigError(f"first samples {starts} do not increase", where=where, hint="order the entries by their first sample")
    if ramp and ramp[-1][1] != global_batch_size:
        raise ConfigError(
            f"the last entry has batch {ramp[-1][1]}, global_batch_size is {global_batch_size}",
            where=where,
            hint="end the ramp with [first_sample, global_batch_size]: else nothing says when that size begins",
            got=ramp[-1][1],
            wanted=global_batch_size,
        )


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted((first, end) for first, end in ranges if first < end):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)
