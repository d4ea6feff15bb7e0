"""How often training was interrupted, as the ledger tells: for the interval between saves. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry

_ORDERLY = (Event.RUN_LEFT, Event.RUN_FINISHED, Event.RUN_HALTED)


@dataclass(frozen=True, slots=True)
class Interruptions:
    """`num_failures` starts followed on one that nobody had ended; `observed_s` is the time from each start to its last entry."""

    num_failures: int
    observed_s: float
    tuned_steps: int | None
    """The last interval that was measured, if any."""


def fold_interruptions(entries: Iterable[LedgerEntry]) -> Interruptions:
    """A start is the first attempt of a generation: going back to another checkpoint within one is no interruption."""
    num_failures, observed_s = 0, 0.0
    generation = -1
    began: datetime | None = None
    last: datetime | None = None
    is_open = False
    tuned_steps: int | None = None
    for entry in entries:
        if entry.event == Event.ATTEMPT_STARTED and entry.generation != generation:
            num_failures += is_open
            observed_s += _seconds(began, last)
            generation, is_open = entry.generation, True
            began = last = _time(entry)
        elif began is not None and entry.generation == generation and is_open:
            last = _time(entry) or last
            is_open = entry.event not in _ORDERLY
        if entry.event == Event.INTERVAL_TUNED and isinstance(steps := entry.fields.get("steps"), int):
            tuned_steps = steps
    return Interruptions(num_failures, observed_s + _seconds(began, last), tuned_steps)


def _time(entry: LedgerEntry) -> datetime | None:
    try:
        return datetime.fromisoformat(entry.time_utc)
    except ValueError:
        return None


def _seconds(began: datetime | None, last: datetime | None) -> float:
    return max(0.0, (last - began).total_seconds()) if began is not None and last is not None else 0.0
