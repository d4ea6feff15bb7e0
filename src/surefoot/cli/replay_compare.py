"""A replay beside what was recorded: pure functions over rows of the metrics store."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from surefoot.observe.interventions import Segment, segment_at

FIGURES: Final = ("loss", "grad_norm")
COUNTS: Final = ("next_sample", "num_live_tokens", "action")

Rows = Mapping[int, Mapping[str, Any]]
"""By step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`what` was recorded otherwise than it was computed now. `relative` is that of two numbers, infinite when one of them is none, and
    None for what is no figure."""

    step: int
    attempt: int
    what: str
    recorded: Any
    replayed: Any
    relative: float | None


@dataclass(frozen=True, slots=True)
class Compared:
    """`first` is the first step that differs. `gone` are skipped steps whose figures were not the same this time: what they were skipped
    for did not come again. `missing` were not recorded."""

    num_compared: int
    num_differing: int
    first: Difference | None
    gone: tuple[int, ...]
    missing: tuple[int, ...]


def rows_of_line(rows: Sequence[Mapping[str, Any]], segments: Sequence[Segment]) -> dict[int, Mapping[str, Any]]:
    """Of each step the row of the attempt that the present line has it from; a later generation's row takes an earlier one's place."""
    found: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        segment = segment_at(segments, int(row["step"]))
        before = found.get(int(row["step"]))
        if segment is not None and segment.attempt == row["attempt"] and (before is None or before["generation"] <= row["generation"]):
            found[int(row["step"])] = row
    return found


def compare_steps(recorded: Rows, replayed: Rows, *, steps: range, skipped: Collection[int]) -> Compared:
    """Bit for bit. Of a step that was `skipped` by order the figures may be others: they changed nothing."""
    differing: list[Difference] = []
    gone: list[int] = []
    missing = tuple(step for step in steps if step not in recorded)
    for step in (step for step in steps if step in recorded):
        difference = compare_step(recorded[step], replayed.get(step))
        if difference is not None and difference.what in FIGURES and step in skipped:
            gone.append(step)
        elif difference is not None:
            differing.append(difference)
    first = differing[0] if differing else None
    return Compared(len(steps) - len(missing), len(differing), first, tuple(gone), missing)


def compare_step(was: Mapping[str, Any], now: Mapping[str, Any] | None) -> Difference | None:
    """The gravest thing that differs: what was done with which samples, before what it gave."""
    step, attempt = int(was["step"]), int(was["attempt"])
    if now is None:
        return Difference(step, attempt, "step", "computed", "not reached", None)
    for name in COUNTS:
        if _done(was[name]) != _done(now[name]):
            return Difference(step, attempt, name, was[name], now[name], None)
    for name in FIGURES:
        if not _same(was[name], now[name]):
            return Difference(step, attempt, name, was[name], now[name], relative_difference(was[name], now[name]))
    return None


def relative_difference(recorded: float, replayed: float) -> float:
    """Relative to the recorded value; infinite where only one is a number."""
    if not (math.isfinite(recorded) and math.isfinite(replayed)):
        return math.inf
    return abs(replayed - recorded) / max(abs(recorded), 1e-300)


def _done(value: object) -> object:
    """A step at which the run paused was skipped, and a replay goes on."""
    return "skip" if value == "pause" else value


def _same(one: float, other: float) -> bool:
    return struct.pack(">d", one) == struct.pack(">d", other) or (math.isnan(one) and math.isnan(other))
