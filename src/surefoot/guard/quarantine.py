"""A piece of the data that storage gives back damaged, again and again: ledgered once, by whichever rank met it."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.core.clock import Clock
from surefoot.core.errors import DataError, SurefootError
from surefoot.core.events import Event
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger

logger = logging.getLogger(__name__)

DAMAGED = "damaged-block"
"""`kind` among the values of a DataError that names `shard` and `block`: what the readers of shards raise."""


def note_quarantine(
    error: BaseException | None, *, run_dir: Path, rank: int, generation: int, attempt: int, step: int, clock: Clock
) -> None:
    """Local. Ledger what `error` says about a damaged shard, unless another rank or start did. Raises nothing itself."""
    if not isinstance(error, DataError) or error.values.get("kind") != DAMAGED:
        return
    try:
        with _alone(run_dir):  # ranks that meet the same block ask and tell one after the other
            path = run_dir / LEDGER_NAME
            known = [entry.fields for entry in read_ledger(path) if entry.event == Event.SHARD_QUARANTINED]
            if any(all(found.get(name) == error.values.get(name) for name in ("shard", "block")) for found in known):
                return
            ledger = Ledger(path, clock=clock, by=f"rank {rank}")
            ledger.append(
                Event.SHARD_QUARANTINED, generation=generation, attempt=attempt, step=step, reason=error.what, fields=error.values
            )
    except (SurefootError, OSError) as problem:
        logger.warning("a damaged shard could not be ledgered: %s", problem)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
