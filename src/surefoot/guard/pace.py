"""The interval between saves where it is "auto": measured, chosen again at each commit, the same on all ranks."""

from __future__ import annotations

import os
from collections import deque
from statistics import median

from surefoot.core.events import Event
from surefoot.core.records import Signals
from surefoot.core.sections import CheckpointSection
from surefoot.guard.recording import Recorder
from surefoot.guard.save_policy import AUTO_START_STEPS
from surefoot.observe.interruptions import Interruptions
from surefoot.plan.failures.interval import Interval, Measurements, choose_interval, differs_enough, mtbf_s
from surefoot.tensors.world import World

_MIN_STEPS = 3
"""Durations that a median needs before it means anything."""


class Pace:
    """Every figure comes from the vectors of the steps, and from what rank 0 read of the ledger at the start: ranks choose alike."""

    def __init__(self, section: CheckpointSection, *, world: World, recorder: Recorder) -> None:
        num_nodes = max(1, world.size // int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
        self._section = section
        self._recorder = recorder
        self._prior_s = mtbf_s(section.auto_prior_per_day, num_nodes=num_nodes)
        self._history = Interruptions(0, 0.0, None)
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._durations_s: deque[float] = deque(maxlen=50)
        self._begun_s: float | None = None
        self.auto_steps = AUTO_START_STEPS

    def start(self, history: Interruptions) -> None:
        """Local. Go on from what an earlier process measured."""
        self._history = history
        self.auto_steps = history.tuned_steps or self.auto_steps

    def step(self, signals: Signals) -> None:
        """Local. One more step was exchanged."""
        now_s = signals.ranks[0].step_clock_s
        if self._last_s is not None:
            self._durations_s.append(now_s - self._last_s)
        self._first_s = now_s if self._first_s is None else self._first_s
        self._last_s = now_s

    def save_begun(self) -> None:
        self._begun_s = self._last_s

    def committed(self, signals: Signals) -> None:
        """Local. Choose again, now that a save is known to be whole; a change is ledgered with everything that it was chosen from."""
        if self._section.interval_steps != "auto" or self._begun_s is None or len(self._durations_s) < _MIN_STEPS:
            return
        if self._first_s is None or self._last_s is None:
            return
        measured = Measurements(
            step_s=median(self._durations_s),
            stall_s=signals.save_stall_s,
            write_s=self._last_s - self._begun_s,
            num_failures=self._history.num_failures,
            observed_s=self._history.observed_s + self._last_s - self._first_s,
        )
        chosen = choose_interval(measured, prior_mtbf_s=self._prior_s, max_s=self._section.auto_max_s)
        if differs_enough(chosen.num_steps, self.auto_steps):
            self._tell(measured, chosen)
            self.auto_steps = chosen.num_steps

    def _tell(self, measured: Measurements, chosen: Interval) -> None:
        fields = {
            "steps": chosen.num_steps,
            "before": self.auto_steps,
            "interval_s": chosen.seconds,
            "step_s": measured.step_s,
            "stall_s": measured.stall_s,
            "write_s": measured.write_s,
            "num_failures": measured.num_failures,
            "observed_s": measured.observed_s,
            "mtbf_s": chosen.mtbf_s,
        }
        self._recorder.ledger(Event.INTERVAL_TUNED, rule="young-daly", reason=chosen.reason, fields=fields)
        self._recorder.say(f"saving every {chosen.num_steps} steps from now on, {chosen.seconds:.3g} s: {chosen.reason}")
