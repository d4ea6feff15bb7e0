"""A halt holds until a person has released the run."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.core.errors import TrainingHalted
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry


def refuse_halted(entries: Sequence[LedgerEntry]) -> None:
    """Raises TrainingHalted while the run's last halt has not been released by a person."""
    halted: LedgerEntry | None = None
    for entry in entries:
        if entry.event == Event.RUN_HALTED:
            halted = entry
        elif entry.event == Event.RUN_RELEASED:
            halted = None
    if halted is not None:
        raise TrainingHalted(
            f"the run was halted at step {halted.step} by {halted.rule}: {halted.reason}",
            where=f"ledger entry {halted.seq}",
            hint="find the cause, then `surefoot resume RUN --cause TEXT` lets it go on from its newest checkpoint",
        )
