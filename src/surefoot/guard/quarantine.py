"""A shard that storage does not give back as it was written, again and again: ledgered once, by whichever rank of node 0 met it."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from surefoot.core.clock import Clock
from surefoot.core.errors import DataError, SurefootError, lost_shard
from surefoot.core.events import Event
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger

logger = logging.getLogger(__name__)

_WAIT_STEP_S: Final = 0.01
_TOLD_APART: Final = ("shard", "split", "kind", "block")


def note_lost_shard(
    error: BaseException | None,
    *,
    run_dir: Path,
    rank: int,
    generation: int,
    attempt: int,
    step: int,
    clock: Clock,
    wait_limit_s: float = 5.0,
) -> None:
    """Local. Ledger what `error` says about a shard, unless another rank or start did; on other nodes than node 0 it goes to the log.

    `wait_limit_s` bounds the wait for a rank that does the same, which takes milliseconds; no setting, as that of the ledger. Raises
    nothing itself.
    """
    shard = lost_shard(error)
    if not shard or not isinstance(error, DataError):
        return
    if os.environ.get("GROUP_RANK", "0") != "0":  # only processes of node 0 append to the ledger
        logger.warning("rank %d is not on node 0, so the ledger will not say it: shard %s: %s", rank, shard, error)
        return
    try:
        with _alone(run_dir, clock=clock, wait_limit_s=wait_limit_s):  # ranks that meet the same shard ask and tell one after the other
            path = run_dir / LEDGER_NAME
            known = [entry.fields for entry in read_ledger(path) if entry.event == Event.SHARD_QUARANTINED]
            if any(all(found.get(name) == error.values.get(name) for name in _TOLD_APART) for found in known):
                return
            ledger = Ledger(path, clock=clock, by=f"rank {rank}")
            ledger.append(
                Event.SHARD_QUARANTINED, generation=generation, attempt=attempt, step=step, reason=error.what, fields=error.values
            )
    except (SurefootError, OSError) as problem:
        logger.warning("shard %s could not be ledgered as lost: %s", shard, problem)


@contextmanager
def _alone(folder: Path, *, clock: Clock, wait_limit_s: float) -> Iterator[None]:
    """Raises SurefootError when another process keeps the folder for longer than `wait_limit_s`."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        give_up_s = clock.monotonic_s() + wait_limit_s
        while not _locked(fd):
            if clock.monotonic_s() >= give_up_s:
                hint = f"find it with: fuser {folder}"
                raise SurefootError(f"another process has held it for {wait_limit_s:g} s", where=str(folder), hint=hint)
            clock.sleep(_WAIT_STEP_S)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
