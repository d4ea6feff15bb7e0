"""What a verb or an aide changes in a run, or finds out about it, is said in its ledger, whatever generation the run is in by then."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from pathlib import Path

from surefoot.core.clock import SystemClock
from surefoot.core.errors import PeerLost
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from surefoot.observe.lineage import fold_counters

_NUM_TRIES = 5  # A live run may begin a generation between the look and the line.


def tell(
    run_dir: Path,
    event: Event,
    *,
    by: str = "",
    rule: str = "",
    reason: str = "",
    fields: Mapping[str, object] | None = None,
    ledger: Ledger | None = None,
) -> LedgerEntry:
    """Append one entry, at the generation, attempt and step that the run stands at. `by`: the user where nothing else is said.

    `ledger` is given by who holds it alone.
    """
    ledger = ledger or users_ledger(run_dir, by=by)
    for last_try in [False] * (_NUM_TRIES - 1) + [True]:
        at = fold_counters(read_ledger(ledger.path))
        try:
            return ledger.append(
                event, generation=at.generation, attempt=at.attempt, step=at.step, rule=rule, reason=reason, fields=fields or {}
            )
        except PeerLost:
            if last_try:
                raise
    raise AssertionError("the last try returns or raises")


def users_ledger(run_dir: Path, *, by: str = "") -> Ledger:
    return Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by=by or user_name())


def user_name() -> str:
    """Who says so. A container often runs under a number that no passwd entry names."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Python 3.13 made it an OSError
        return f"uid {os.getuid()}"
