"""Who starts the coordinator of a job, and when a new one: some node that still lives, the lowest first, and never one that is cut off.

A coordinator that is seen dead (its process was on this boot) is replaced at once. One on a host that cannot be seen is judged by what it
leaves in the run folder every few seconds: while that changes it lives, and it is we who are cut off. Of two that start one at the same
moment the newer one wins; the other sees it and ends.
"""

from __future__ import annotations

import logging
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from surefoot.core.clock import Clock
from surefoot.core.holder import this_process
from surefoot.launch.coordinator_claim import FOLDER
from surefoot.launch.coordinator_settings import CoordinatorSettings, start_coordinator
from surefoot.launch.coordinator_wire import Contact, read_contact

logger = logging.getLogger(__name__)

# No settings. A coordinator writes its state every 5 s; one that has not for twice that is gone, and by then every rank has been fenced.
_STATE_SILENT_S = 10.0
_PER_RANK_S = 0.5
_PER_RANK_UNSEEN_S = 2.0
_START_LIMIT_S = 10.0


class CoordinatorKeeper:
    """`look` is called a few times per second in the agent's one thread."""

    def __init__(self, run_dir: Path, settings: CoordinatorSettings, *, clock: Clock) -> None:
        self._run_dir, self._settings, self._clock = run_dir, settings, clock
        self._started: subprocess.Popen[bytes] | None = None
        self._not_before_s = 0.0
        self._state: bytes | None = None
        self._state_since_s = clock.monotonic_s()

    def start(self, *, generation: int = 0) -> None:
        """A new one, which goes on from the journal. It outlives this process."""
        settings = replace(self._settings, generation=max(generation, self._settings.generation))
        self._started = start_coordinator(self._run_dir, settings)
        self._not_before_s = self._clock.monotonic_s() + _START_LIMIT_S

    def look(self, *, lost_for_s: float, node_rank: int, generation: int) -> None:
        """Start a new one if it is gone and it is this node's turn."""
        if self._started is not None:
            self._started.poll()
        if lost_for_s == 0.0:
            self._state = None
            return
        now_s = self._clock.monotonic_s()
        if now_s >= self._not_before_s and self._is_gone(read_contact(self._run_dir), now_s, lost_for_s=lost_for_s, node_rank=node_rank):
            logger.warning("the coordinator is gone: this node starts a new one")
            self.start(generation=generation)

    def _is_gone(self, contact: Contact | None, now_s: float, *, lost_for_s: float, node_rank: int) -> bool:
        if contact is not None and contact.boot_id == this_process().boot_id:
            return not _exists(contact.pid) and lost_for_s >= node_rank * _PER_RANK_S
        content = self._read_state()
        if content != self._state:
            self._state, self._state_since_s = content, now_s
        return now_s - self._state_since_s >= _STATE_SILENT_S + node_rank * _PER_RANK_UNSEEN_S

    def _read_state(self) -> bytes:
        try:
            return (self._run_dir / FOLDER / "state.json").read_bytes()
        except OSError:
            return b""


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return os.path.exists(f"/proc/{pid}")
