"""Opening the ledger of a run at a start: whether it still is what was written, asked before anything is added to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot.core.clock import Clock
from surefoot.core.errors import Corrupt
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import LEDGER_NAME, Ledger, manifest_positions, read_ledger, verify_ledger
from surefoot.observe.lineage import fold_counters


def open_ledger(run_dir: Path, *, clock: Clock, by: str) -> tuple[Ledger, list[LedgerEntry]]:
    """The ledger of the run and its entries so far. Call with the run's lock held; writes nothing.

    Raises Corrupt (exit 5) when a line was changed, removed or moved, or when a checkpoint remembers more than the ledger holds.
    """
    path = run_dir / LEDGER_NAME
    check = verify_ledger(path, manifests=manifest_positions(run_dir))
    if not check.ok:
        raise Corrupt(
            f"the ledger is not what was written, from entry {check.first_bad} on: {check.detail}",
            where=str(path),
            hint="put back a copy of it; without one, another [run] dir starts anew (the checkpoints stay readable by stock torch). "
            "A checkpoint of another run that was copied into checkpoints/ looks like this too: `surefoot checkpoint import` takes it in",
            first_bad=check.first_bad,
        )
    return Ledger(path, clock=clock, by=by), read_ledger(path)


def note_take_over(ledger: Ledger, entries: Sequence[LedgerEntry], *, reason: str, former: Mapping[str, object]) -> None:
    """Ledger whose lock was taken over and why."""
    counters = fold_counters(entries)
    ledger.append(
        Event.LOCK_TAKEN_OVER,
        generation=counters.generation,
        attempt=counters.attempt,
        step=counters.step,
        reason=reason,
        fields=former,
    )
