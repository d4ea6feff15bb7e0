"""What a run has measured of itself, as far as a plan needs it: pace, stall of a save, time to write one, interruptions. Pure.

Rows are those of the metrics store, one per step, in the order they were written. `saved` of a row names the newest save that had begun
before it, so the step that paid for a save is the one that its id names. A step that ended in a save or an evaluation says nothing about
the pace of training; a step computed again after an interruption was lost.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

Row = Mapping[str, Any]

_ID = re.compile(r"s(\d+)-a")

NEWEST = 500
"""Rows that the pace is taken from: it follows a change of machine within minutes to hours."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Medians over the newest steps. `stall_s` is 0 and `num_saves` 0 where none of them saved."""

    step_s: float
    tokens_per_step: float
    stall_s: float
    num_saves: int
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s


@dataclass(frozen=True, slots=True)
class Restarts:
    """`restart_s`: from the last finished step before an interruption to the first one after it, a step's own time taken off."""

    restart_s: float | None
    lost_steps: float | None
    num: int


def pace_of(rows: Sequence[Row]) -> Pace | None:
    """None before a step was measured. Warm-up of the first few steps drops out by the median."""
    newest = [row for row in rows if row["step_s"]][-NEWEST:]
    saving = _saving_steps(newest)
    plain = [row for row in newest if row["step"] not in saving and not row["evaluate_s"]] or newest
    if not plain:
        return None
    saves = [float(row["save_s"]) for row in newest if row["step"] in saving and row["save_s"] is not None]
    return Pace(
        step_s=statistics.median(float(row["step_s"]) for row in plain),
        tokens_per_step=statistics.median(float(row["num_live_tokens"]) for row in plain),
        stall_s=statistics.median(saves) if saves else 0.0,
        num_saves=len(saves),
        num_steps=len(plain),
    )


def restarts_of(rows: Sequence[Row]) -> Restarts:
    """An interruption is where the generation changes between two rows. Deliberate stops count too: a start costs them no less."""
    gaps: list[float] = []
    lost: list[int] = []
    for before, after in pairwise(rows):
        if before["generation"] == after["generation"]:
            continue
        gaps.append(max(0.0, _seconds(before["time_utc"], after["time_utc"]) - float(after["step_s"] or 0.0)))
        lost.append(max(0, int(before["step"]) - int(after["step"]) + 1))
    if not gaps:
        return Restarts(None, None, 0)
    return Restarts(statistics.median(gaps), statistics.fmean(lost), len(gaps))


def _saving_steps(rows: Sequence[Row]) -> set[int]:
    ids = {str(row["saved"]) for row in rows if row["saved"]}
    return {int(found[1]) for found in map(_ID.match, ids) if found}


def _seconds(before: datetime, after: datetime) -> float:
    return (after - before).total_seconds()
