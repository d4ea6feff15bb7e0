"""Whether steps wait for their data: a run that is not fed in time is as slow as its slowest reader, and nothing else says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from surefoot.core.records import Signals
from surefoot.core.sections import MonitorSection
from surefoot.core.units import show_duration

_Step = tuple[float, list[float]]


class DataWaits:
    """The newest steps: how long each took, and how long each rank waited in it.

    Two windows of them, one behind the other: what one alone shows may be a file that was read for the first time, or a busy machine.
    """

    def __init__(self, section: MonitorSection) -> None:
        self._section = section
        self._steps: deque[_Step] = deque(maxlen=2 * section.data_wait_steps)
        self._told_s = float("-inf")

    def step(self, signals: Signals, *, step_s: float) -> str | None:
        """Local. What to say after one more step of `step_s` seconds, saves and evaluations left out; mostly nothing."""
        self._steps.append((step_s, [part.data_wait_s for part in signals.ranks]))
        section, num_steps, now_s = self._section, len(self._steps), signals.ranks[0].step_clock_s
        if num_steps < 2 * section.data_wait_steps or now_s - self._told_s < section.data_wait_repeat_s:
            return None
        steps = list(self._steps)
        if not all(self._is_much(half) for half in (steps[: section.data_wait_steps], steps[section.data_wait_steps :])):
            return None
        waited_s, all_s = _sums(steps)
        self._told_s = now_s
        by_rank = [sum(waits) for waits in zip(*(waits for _, waits in self._steps), strict=True)]
        worst = by_rank.index(max(by_rank))
        return (
            f"the last {num_steps} steps waited {waited_s / all_s:.0%} of their time for data, {show_duration(waited_s)} in all, "
            f"rank {worst} the longest: raise data.prefetch_steps, or look at the storage of data.path"
        )

    def _is_much(self, steps: Sequence[_Step]) -> bool:
        waited_s, all_s = _sums(steps)
        return waited_s >= max(self._section.data_wait_min_s * len(steps), self._section.data_wait_share * all_s)


def _sums(steps: Sequence[_Step]) -> tuple[float, float]:
    """(seconds waited, seconds in all): all ranks wait for the one that waits longest."""
    return sum(max(waits_s) for _, waits_s in steps), sum(duration_s for duration_s, _ in steps)
