"""What the agent keeps telling others while it works: `live.json` for status and dashboards, the lease of the lock for other hosts."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import Clock
from surefoot.core.errors import PeerLost, SurefootError
from surefoot.core.records import Phase
from surefoot.launch.crew import Crew
from surefoot.observe.live import LiveRecord, RankLive, write_live

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class Pulse:
    """Writes both when they are due, as long as this machine holds `lock`. A full disk is warned about and never stops a run; a lock that
    is somebody else's does."""

    def __init__(self, run_dir: Path, *, lock: RunLock | None, status_interval_s: float, lease_s: float, clock: Clock) -> None:
        self._run_dir = run_dir
        self.lock = lock
        self._status_interval_s = status_interval_s
        self._renew_interval_s = lease_s / _RENEWALS_PER_LEASE
        self._clock = clock
        self._status_due_s = self._renew_due_s = clock.monotonic_s()
        self._failing = False

    def beat(self, crew: Crew | None, *, generation: int, attempt: int, step: int, num_restarts: int) -> None:
        """Look at the clock and write what is due. Raises PeerLost when the run was taken over."""
        now_s = self._clock.monotonic_s()
        if self.lock is None or now_s < min(self._renew_due_s, self._status_due_s):
            return
        try:
            if now_s >= self._renew_due_s:
                self._renew_due_s = now_s + self._renew_interval_s
                self.lock.renew(generation=generation)
            if now_s >= self._status_due_s:
                self._status_due_s = now_s + self._status_interval_s
                write_live(self._run_dir, self._record(crew, generation, attempt, step, num_restarts))
            self._failing = False
        except PeerLost:
            raise
        except (OSError, SurefootError) as error:
            if not self._failing:
                logger.warning("cannot renew live.json and the lock (%s): status goes stale, another host may think this run dead", error)
            self._failing = True

    def now_due(self) -> None:
        """The generation has changed: the next beat writes both."""
        self._status_due_s = self._renew_due_s = self._clock.monotonic_s()

    def _record(self, crew: Crew | None, generation: int, attempt: int, step: int, num_restarts: int) -> LiveRecord:
        now_s = self._clock.monotonic_s()
        beats = crew.board.read_all() if crew is not None else []
        ranks = tuple(
            RankLive(rank=beat.rank, pid=beat.pid, phase=beat.phase.label, step=beat.step, age_s=round(now_s - beat.mono_s, 3))
            for beat in beats
            if beat.num_beats
        )
        return LiveRecord(
            pid=os.getpid(),
            host=socket.gethostname(),
            generation=generation,
            attempt=attempt,
            phase=ranks[0].phase if ranks else Phase.START.label,
            step=max((rank.step for rank in ranks), default=step),
            ranks=ranks,
            updated_utc=self._clock.utc(),
            num_restarts=num_restarts,
        )
