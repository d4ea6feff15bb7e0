"""Where the time of a recovery went, from the fault to the first new step, on this machine's monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from surefoot.coordinate.beats import Beat
from surefoot.core.records import Phase
from surefoot.launch.ending import Ending


@dataclass(slots=True)
class RecoverySplit:
    """Filled by the agent as it goes; the moments after the fork are read off the beats of the slowest rank.

    detect: from the fault until it was known. stop: evidence, kill, and what was staged brought home. rendezvous: fork, until the last
    rank restores. load: until the last one has its state. verify: until the loop begins. first_step: until a step is done.
    """

    fault_s: float
    detected_s: float
    stopped_s: float
    restoring_s: dict[int, float] = field(default_factory=dict)
    restored_s: dict[int, float] = field(default_factory=dict)
    stepping_s: dict[int, float] = field(default_factory=dict)
    first_steps: dict[int, int] = field(default_factory=dict)
    done_s: float | None = None

    def take(self, beats: list[Beat]) -> bool:
        """Look at the beats of the new generation; True once a step of it is done, and then for good."""
        for beat in beats:
            if not beat.num_beats:
                continue
            if beat.phase == Phase.RESTORE or beat.restored or beat.phase not in (Phase.START, Phase.DATA):
                self.restoring_s.setdefault(beat.rank, beat.mono_s)
            if beat.restored:
                self.restored_s.setdefault(beat.rank, beat.mono_s)
            if beat.restored and beat.phase == Phase.STEP:
                self.stepping_s.setdefault(beat.rank, beat.mono_s)
                first = self.first_steps.setdefault(beat.rank, beat.step)
                if beat.step > first and self.done_s is None:
                    self.done_s = beat.mono_s
        return self.done_s is not None

    def as_json(self) -> dict[str, float]:
        """Seconds per part; they add up to `total_s`. A part that was too short to be seen between two looks is in the next one."""
        marks = [self.fault_s, self.detected_s, self.stopped_s]
        for at_s in (self.restoring_s, self.restored_s, self.stepping_s):
            marks.append(max([marks[-1], *at_s.values()]))
        marks.append(max(marks[-1], self.done_s or marks[-1]))
        names = ("detect_s", "stop_s", "rendezvous_s", "load_s", "verify_s", "first_step_s")
        split = {name: round(after - before, 3) for name, (before, after) in zip(names, pairwise(marks), strict=True)}
        return {**split, "total_s": round(marks[-1] - marks[0], 3)}


def begin_split(ending: Ending, *, stopped_s: float) -> RecoverySplit | None:
    """After an ending that a restart may follow; None where nothing was lost. `stopped_s` is when none of its ranks was left."""
    if ending.kind != "failed" or not ending.detected_mono_s:
        return None
    return RecoverySplit(ending.detected_mono_s - detected_after_s(ending), ending.detected_mono_s, stopped_s)


def detected_after_s(ending: Ending) -> float:
    """From the fault until it was known: of an exit since the exit, of a silence since the last beat; 0 where nobody knows the fault."""
    if ending.alarm is not None:
        return max(0.0, ending.alarm.age_s)
    return max(0.0, ending.detected_mono_s - ending.culprit.mono_s) if ending.culprit is not None else 0.0
