"""The uploader of one rank where no agent runs one: a thread beside the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.upload import Uploader
from surefoot.core.clock import Clock
from surefoot.core.sections import RunConfig
from surefoot.guard.account import Account
from surefoot.observe.ledger import LEDGER_NAME, Ledger

logger = logging.getLogger(__name__)

_BUSY_WAIT_S = 0.01  # while other ranks' parts are awaited, which show only in the folder
_IDLE_WAIT_S = 1.0  # against a lost wake-up; also how often a ledger that could not be written is tried again


class UploadThread:
    """Owns an Uploader: after `start`, nobody else calls it. `account` is the leader's."""

    def __init__(self, uploader: Uploader, *, account: Account | None) -> None:
        self._uploader = uploader
        self._account = account
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._read_back = True
        self._limit_s = 0.0
        self._thread = threading.Thread(target=self._run, name="surefoot-upload", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def kick(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def end(self, *, limit_s: float, read_back: bool) -> None:
        """Finish what is under way, within `limit_s`; what was committed meanwhile is read back unless there is no time for that."""
        self._read_back, self._limit_s = read_back, limit_s
        self._ending.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(limit_s + _IDLE_WAIT_S)
        if self._thread.is_alive():
            logger.warning("the upload did not end within %g s: storage hangs", limit_s)

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                worked = self._uploader.step()
                if self._account is not None:
                    self._account.write()
                if not worked:
                    self._wake.wait(_BUSY_WAIT_S if self._uploader.busy else _IDLE_WAIT_S)
                    self._wake.clear()
            for failure in self._uploader.drain(limit_s=self._limit_s, read_back=self._read_back):
                logger.warning("not saved: %s", failure)
            if self._account is not None:
                self._account.write()
        except Exception:  # the boundary of the thread: the ranks see that it is gone and fail what it had
            logger.exception("the upload thread died")


def upload_thread(slots: Sequence[Slot], *, config: RunConfig, run_dir: Path, generation: int, leads: bool, clock: Clock) -> UploadThread:
    """What uploads from `slots` of this rank, not started yet. The one that `leads` ledgers what becomes of saves, and retires."""
    root, account = run_dir / "checkpoints", None
    if leads:
        ledger = Ledger(run_dir / LEDGER_NAME, clock=clock, by="rank 0")
        account = Account(ledger, config=config, root=root, generation=lambda: generation)
    uploader = Uploader(
        root,
        slots,
        limit_s=config.checkpoint.upload_limit_s,
        on_committed=account.committed if account else None,
        on_read_back=account.read_back if account else None,
        on_failed=None,
    )
    return UploadThread(uploader, account=account)
