"""Whether steps wait for their data: a run that is not fed in time is as slow as its slowest reader, and nothing else says so."""

from __future__ import annotations

from collections import deque

from surefoot.core.records import Signals
from surefoot.core.sections import MonitorSection
from surefoot.core.units import show_duration


class DataWaits:
    """The newest steps: how long each took, and how long each rank waited in it."""

    def __init__(self, section: MonitorSection) -> None:
        self._section = section
        self._steps: deque[tuple[float, list[float]]] = deque(maxlen=section.data_wait_steps)
        self._told_s = float("-inf")

    def step(self, signals: Signals, *, step_s: float) -> str | None:
        """Local. What to say after one more step of `step_s` seconds, saves and evaluations left out; mostly nothing."""
        self._steps.append((step_s, [part.data_wait_s for part in signals.ranks]))
        section, num_steps, now_s = self._section, len(self._steps), signals.ranks[0].step_clock_s
        if num_steps < section.data_wait_steps or now_s - self._told_s < section.data_wait_repeat_s:
            return None
        waited_s = sum(max(waits_s) for _, waits_s in self._steps)  # all ranks wait for the one that waits longest
        all_s = sum(duration_s for duration_s, _ in self._steps)
        if waited_s < max(section.data_wait_min_s * num_steps, section.data_wait_share * all_s):
            return None
        self._told_s = now_s
        by_rank = [sum(waits) for waits in zip(*(waits for _, waits in self._steps), strict=True)]
        worst = by_rank.index(max(by_rank))
        return (
            f"the last {num_steps} steps waited {waited_s / all_s:.0%} of their time for data, {show_duration(waited_s)} in all, "
            f"rank {worst} the longest: raise data.prefetch_steps, or look at the storage of data.path"
        )
