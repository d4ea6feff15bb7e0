"""The lead of a run: whoever has rank 0 holds the lock, and is the one that writes the ledger. On several machines it moves with rank 0.

What a machine without the lead has to say waits. If it gets the lead in the next generation, its lines come first: whoever had it before
is gone and wrote none. If it does not, another machine had or has the lead and has written what it saw of the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from surefoot.coordinate.lock import RunLock
from surefoot.core.events import Event
from surefoot.core.holder import parse_lock
from surefoot.launch.aide import AideSpec
from surefoot.launch.director import Berth
from surefoot.launch.status import Pulse
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.opening import note_take_over

_MAX_WAITING = 64


class Lead:
    """`take` gets the lock on the coordinator's word: called with a berth that has rank 0, on a machine that does not hold it."""

    def __init__(self, lock: RunLock | None, *, job: str, ledger: Ledger, take: Callable[[Berth], RunLock] | None) -> None:
        self.lock = lock
        self.job = job
        self._ledger = ledger
        self._take = take
        self._waiting: list[tuple[Event, Mapping[str, Any]]] = []

    @classmethod
    def here(cls, lock: RunLock | None, *, ledger: Ledger) -> Lead:
        """For good: one machine has all ranks. The caller holds the lock and gives it back."""
        assert lock is not None  # only a lead that can be taken begins without
        return cls(lock, job=lock.record.job, ledger=ledger, take=None)

    def only(self, spec: AideSpec) -> AideSpec:
        """An aide works for the whole run: where the lead is."""
        return replace(spec, wanted=lambda: self.lock is not None and spec.wanted())

    def follow(self, berth: Berth, *, lock_of: Pulse) -> None:
        """Take the lead if the berth has rank 0, give it up if it has not. Raises PeerLost when it is not this machine's to take."""
        if self._take is not None and not berth.leads:
            self.close()
            self._waiting.clear()
        elif self._take is not None and self.lock is None:
            self.lock = self._take(berth)
            if (taken := self.lock.taken_over) is not None:
                note_take_over(self._ledger, read_ledger(self._ledger.path), reason=taken.reason, former=taken.former)
            waiting, self._waiting = self._waiting, []
            for event, values in waiting:
                self._ledger.append(event, **values)
        lock_of.lock = self.lock

    def append(self, event: Event, **values: Any) -> None:
        """As `Ledger.append`; without the lead the line waits."""
        if self.lock is not None:
            self._ledger.append(event, **values)
        elif event is not Event.GENERATION_STARTED and len(self._waiting) < _MAX_WAITING:  # who led it has written that
            self._waiting.append((event, values))

    def is_passed_on(self) -> bool:
        """Whether the lock is gone because another machine of this job leads now; then this one does not any more, and may go on."""
        record = parse_lock(self.lock.path.read_bytes()) if self.lock is not None and self.lock.path.exists() else None
        if self._take is None or record is None or record.job != self.job:
            return False
        self.lock = None
        return True

    def close(self) -> None:
        """Give a lock back that was taken here; one that the caller holds is the caller's."""
        lock, self.lock = self.lock, None
        if lock is not None and self._take is not None and lock.is_ours():  # on another machine's berth it may have been taken
            lock.release()
