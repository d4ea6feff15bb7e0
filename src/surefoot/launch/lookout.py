"""Looks at the ranks of this machine a few times per second, and keeps what their beats teach about them in the run folder."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from surefoot.coordinate.liveness import Watched, look
from surefoot.coordinate.phase_limits import Learned, gaps_that_ended, limits_now, worst_case_line
from surefoot.coordinate.witness import Alarm
from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.core.durable import write_atomic
from surefoot.core.sections import LaunchSection
from surefoot.launch.crew import Crew
from surefoot.launch.process import process_state
from surefoot.launch.watch import LOOK_INTERVAL_S

logger = logging.getLogger(__name__)

_KEEP_INTERVAL_S = 60.0  # an agent that is killed forgets this much of what it learned


class Lookout:
    """Of one generation: nothing that it saw of an earlier one can alarm, only gaps that ended well are handed on."""

    def __init__(self, crew: Crew, *, run_dir: Path, launch: LaunchSection, clock: Clock) -> None:
        self._crew, self._launch, self._clock = crew, launch, clock
        self._path = run_dir / f"phase_limits_r{crew.ranks.start}.json"
        self._learned = _read(self._path).for_topology(_topology(crew, run_dir))
        self._watched = Watched()
        self._before = crew.board.read_all()
        self._keep_due_s = clock.monotonic_s() + _KEEP_INTERVAL_S
        self._num_kept = self._num_learned = 0

    def worst_case(self) -> str:
        """What a fault costs until it is noticed, in one line."""
        return worst_case_line(limits_now(self._launch, self._learned), look_s=LOOK_INTERVAL_S)

    def look(self) -> Alarm | None:
        beats = self._crew.board.read_all()
        ages_s = self._watched.ages_s
        ended = gaps_that_ended(((beat, ages_s.get(beat.rank, 0.0)) for beat in self._before), {beat.rank: beat for beat in beats})
        for phase, gap_s in ended:
            self._learned = self._learned.note(phase, gap_s)
        self._num_learned += len(ended)
        states = {rank: process_state(pid) for rank in self._crew.alive() if (pid := self._crew.pid(rank)) is not None}
        limits = limits_now(self._launch, self._learned)
        now_s = self._clock.monotonic_s()
        alarm, self._watched = look(self._watched, beats, states, limits, now_s=now_s)
        self._before = beats
        if now_s >= self._keep_due_s:
            self._keep_due_s = now_s + _KEEP_INTERVAL_S
            self.keep()
        return alarm

    def keep(self) -> None:
        """For the next generation, and the next start. A disk that refuses it is a warning: it is learned anew then."""
        if self._num_learned == self._num_kept:
            return
        self._num_kept = self._num_learned
        try:
            write_atomic(self._path, strict_json.dumps(self._learned.as_json()), durable=False)
        except OSError as error:
            logger.warning("what was learned about the time of a step could not be kept: %s", error)


def _read(path: Path) -> Learned:
    try:
        return Learned.from_json(strict_json.loads(path.read_text()))
    except (OSError, ValueError):
        return Learned()


def _topology(crew: Crew, run_dir: Path) -> str:
    """Which ranks of how many, and their config: a change of either may change what a step takes."""
    try:
        config = (run_dir / "config.toml").read_bytes()
    except OSError:
        config = b""
    return f"ranks {crew.ranks.start}-{crew.ranks.stop - 1} of {crew.world_size}, config {hashlib.sha256(config).hexdigest()[:16]}"
