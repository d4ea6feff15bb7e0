"""Who computes which samples of a step: pure slot arithmetic, the same answer on every rank.

A step is `num_samples` consecutive global samples. An atom is `micro_batch_size` consecutive slots of it and is always computed in one
shape. How many ranks there are decides only who computes an atom and when, never what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from surefoot.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Atom:
    """Slots [first_slot, first_slot + num_rows) of a step; `num_rows` may fall short of the micro-batch, and is 0 for a phantom."""

    index: int
    first_slot: int
    num_rows: int

    @property
    def is_phantom(self) -> bool:
        return self.num_rows == 0


def deal(num_samples: int, *, micro_batch_size: int, num_ranks: int, rank: int, rotation: int = 0) -> list[Atom]:
    """The atoms of `rank`, one per micro-step: atom k goes to micro-step k // R on rank (k + rotation) mod R.

    All ranks get the same number of micro-steps. Where atoms run out, a phantom keeps the rank in step with the others. `rotation` moves
    every atom to another rank without changing what is in it.
    """
    num_atoms = -(-num_samples // micro_batch_size)
    num_micro_steps = -(-num_atoms // num_ranks)
    atoms = []
    for micro_step in range(num_micro_steps):
        index = micro_step * num_ranks + (rank - rotation) % num_ranks
        first_slot = index * micro_batch_size
        atoms.append(Atom(index=index, first_slot=first_slot, num_rows=min(micro_batch_size, max(0, num_samples - first_slot))))
    return atoms


class BatchPlan:
    """How many samples each step takes: a table of (first_sample, batch) that ends in `global_batch_size`.

    An entry takes effect at the first step that begins at or after its sample, so a step never changes size half-way. Without a ramp
    every step takes `global_batch_size`.
    """

    def __init__(self, ramp: Sequence[tuple[int, int]] = (), *, global_batch_size: int) -> None:
        _check_ramp(ramp, global_batch_size=global_batch_size)
        self._entries = tuple((int(first), int(batch)) for first, batch in ramp) or ((0, global_batch_size),)
        self._segments = _segments(self._entries)

    def batch_at(self, first_sample: int) -> int:
        """The number of samples of a step that begins at `first_sample`. Needs no history: it holds after a change of the plan too."""
        return next(batch for start, batch in reversed(self._entries) if start <= first_sample)

    def span(self, step: int) -> tuple[int, int]:
        """(first_sample, num_samples) of the step that follows `step` finished steps."""
        first_step, first_sample, batch = next(segment for segment in reversed(self._segments) if segment[0] <= step)
        return first_sample + (step - first_step) * batch, batch

    def step_at(self, sample: int) -> int:
        """How many steps are finished before the one that takes `sample`."""
        first_step, first_sample, batch = next(segment for segment in reversed(self._segments) if segment[1] <= sample)
        return first_step + (sample - first_sample) // batch


def _segments(entries: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first_step, first_sample, batch) of each run of equal steps; an entry that no step begins under has no segment."""
    segments: list[tuple[int, int, int]] = []
    step, sample = 0, 0
    for position, (_, batch) in enumerate(entries):
        later = [start for start, _ in entries[position + 1 :]]
        num_steps = max(0, -(-(later[0] - sample) // batch)) if later else None
        if num_steps == 0:
            continue
        segments.append((step, sample, batch))
        if num_steps is not None:
            step, sample = step + num_steps, sample + num_steps * batch
    return segments


def _check_ramp(ramp: Sequence[tuple[int, int]], *, global_batch_size: int) -> None:
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
