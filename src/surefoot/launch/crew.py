"""The ranks of one generation, from the request to fork them until none is left."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

from surefoot.coordinate.beats import BeatBoard
from surefoot.core.clock import Clock
from surefoot.core.records import Phase
from surefoot.launch.host_facts import HostWatch
from surefoot.launch.process import kill_group
from surefoot.launch.wire import RankExit, Started

_BEFORE_THE_LOOP = frozenset({Phase.START, Phase.DATA, Phase.RESTORE})


class Crew:
    """What the agent holds of a generation: the beats board, a pidfd per rank, and the exits as they are reported.

    A pidfd tells the agent by itself that a rank is gone, and kills that process and no other, whatever became of the nursery. Before it
    has those there is `life_fd`, the read end of a pipe whose other end every rank holds and nobody writes: it ends with the last of them.
    """

    def __init__(self, board: BeatBoard, *, life_fd: int, clock: Clock, world_size: int | None = None) -> None:
        self.board = board
        self.generation = board.generation
        self.ranks = board.ranks
        self.world_size = len(board.ranks) if world_size is None else world_size
        self.started_s = clock.monotonic_s()
        self.host = HostWatch()
        self.exits: list[RankExit] = []
        self.pids: tuple[int, ...] = ()
        self._pidfds: tuple[int, ...] = ()
        self._life_fd = life_fd
        self._clock = clock
        self._unreported_since_s: float | None = None
        self._stepping: set[int] = set()

    def close(self) -> None:
        """Kill whoever still lives and let go of everything."""
        self.kill()
        for fd in (*self._pidfds, self._life_fd):
            os.close(fd)
        self.board.close()

    def adopt(self, started: Started, pidfds: Sequence[int]) -> None:
        self.pids, self._pidfds = started.pids, tuple(pidfds)

    def pid(self, rank: int) -> int | None:
        """None before the nursery said whom it forked."""
        return self.pids[rank - self.ranks.start] if self.pids else None

    def all_stepping(self) -> bool:
        """Whether every rank has reached the loop at some time: its restore lies behind it then."""
        for beat in self.board.read_all():
            if beat.restored or beat.phase not in _BEFORE_THE_LOOP:
                self._stepping.add(beat.rank)
        return len(self._stepping) == len(self.ranks)

    def step(self) -> int:
        """The newest step that any rank has finished; 0 before the first beat."""
        return max(beat.step for beat in self.board.read_all())

    def knows_its_step(self) -> bool:
        """Whether any rank has told how far it is: before the state is restored a beat says 0, which is no step."""
        return any(beat.restored for beat in self.board.read_all())

    def alive(self) -> list[int]:
        """Ranks whose process exists, by the kernel's word."""
        poller = select.poll()
        for pidfd in self._pidfds:
            poller.register(pidfd, select.POLLIN)
        gone = {fd for fd, _ in poller.poll(0)}
        return [rank for rank, pidfd in zip(self.ranks, self._pidfds, strict=False) if pidfd not in gone]

    def is_left(self) -> bool:
        """Whether a rank may still be there, by the kernel's word; also when nobody has said which were forked."""
        if self.pids:
            return bool(self.alive())
        poller = select.poll()
        poller.register(self._life_fd, 0)
        return not poller.poll(0)

    def nursery_silent_s(self) -> float:
        """For how long more ranks have been gone than the nursery has reported; 0 when it keeps up."""
        num_gone = len(self._pidfds) - len(self.alive())
        if num_gone <= len(self.exits):
            self._unreported_since_s = None
            return 0.0
        if self._unreported_since_s is None:
            self._unreported_since_s = self._clock.monotonic_s()
        return self._clock.monotonic_s() - self._unreported_since_s

    def kill(self) -> None:
        """SIGKILL to every rank and the processes that it started; a stopped process obeys it too. Does not wait.

        A rank that died with its nursery has left the processes that it started behind. Those of a rank whose exit is reported are gone:
        the nursery kills them first.
        """
        reported = {ended.rank for ended in self.exits}
        for rank, pid, pidfd in zip(self.ranks, self.pids, self._pidfds, strict=False):  # none is adopted before the nursery speaks
            if rank not in reported:
                kill_group(pid, pidfd=pidfd)
