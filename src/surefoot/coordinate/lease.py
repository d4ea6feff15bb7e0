"""Keeps a lock alive through phases that look at no clock: data preparation, a long restore, a save, somebody else's slow step."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from surefoot.coordinate.lock import RunLock
from surefoot.core.errors import PeerLost

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class LeaseKeeper:
    """Renews `lock` from a thread of its own until it is closed. `check` says, in the owner's thread, that the lock was lost.

    A process that forks must not hold one: start it after the fork, or close it before.
    """

    def __init__(self, lock: RunLock, *, lease_s: float) -> None:
        self._lock = lock
        self._interval_s = lease_s / _RENEWALS_PER_LEASE
        self._lost: PeerLost | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises PeerLost when the run belongs to another job now."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Stop renewing; the lock stays held."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _renew(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self._lock.renew()
            except PeerLost as lost:
                logger.warning("%s", lost)
                self._lost = lost
                return
            except Exception as error:  # the boundary of the thread: one renewal that failed is no reason to stop renewing
                logger.warning("the lock could not be renewed: %s", error)
