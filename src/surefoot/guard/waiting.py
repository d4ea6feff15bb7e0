"""Whether steps wait for their data: a run that is not fed in time is as slow as its slowest reader, and nothing else says so."""

from __future__ import annotations

from collections import deque

from surefoot.core.records import Signals
from surefoot.core.units import show_duration

_NUM_STEPS = 50
"""A mean over fewer would tell of single steps: the first one after a start reads everything anew."""
_HEALTHY_SHARE = 0.1
"""Of a step. Rows that are read ahead of time cost next to nothing; a tenth lost to them is a tenth of the run's money."""
_MIN_WAIT_S = 0.005
"""Less, on average, is the bookkeeping of a step so short that it proves nothing."""
_TELL_EVERY_S = 300.0


class DataWaits:
    """The newest steps: how long each took, and how long each rank waited in it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, list[float]]] = deque(maxlen=_NUM_STEPS)
        self._told_s = float("-inf")

    def step(self, signals: Signals, *, step_s: float) -> str | None:
        """Local. What to say after one more step of `step_s` seconds, saves and evaluations left out; mostly nothing."""
        self._steps.append((step_s, [part.data_wait_s for part in signals.ranks]))
        now_s = signals.ranks[0].step_clock_s
        if len(self._steps) < _NUM_STEPS or now_s - self._told_s < _TELL_EVERY_S:
            return None
        waited_s = sum(max(waits_s) for _, waits_s in self._steps)  # all ranks wait for the one that waits longest
        all_s = sum(duration_s for duration_s, _ in self._steps)
        if waited_s < _MIN_WAIT_S * _NUM_STEPS or waited_s < _HEALTHY_SHARE * all_s:
            return None
        self._told_s = now_s
        by_rank = [sum(waits) for waits in zip(*(waits for _, waits in self._steps), strict=True)]
        worst = by_rank.index(max(by_rank))
        return (
            f"the last {_NUM_STEPS} steps waited {waited_s / all_s:.0%} of their time for data, {show_duration(waited_s)} in all, "
            f"rank {worst} the longest: raise data.prefetch_steps, or look at the storage of data.path"
        )
