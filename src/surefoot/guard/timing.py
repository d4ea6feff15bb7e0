"""The time of one step, split. Wall seconds of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.core.clock import Clock
from surefoot.guard.judging import Measured


class StepTimes:
    """begin -> judge -> judged -> applied -> end, in this order once a step; `measure` adds to a named part."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parts: dict[str, float] = {}
        self._began_s = self._judge_s = self._judged_s = clock.monotonic_s()

    def begin(self) -> None:
        self._parts = {"exchange_s": 0.0, "update_s": 0.0, "save_s": 0.0, "evaluate_s": 0.0}
        self._began_s = self._clock.monotonic_s()

    def judge(self) -> None:
        self._judge_s = self._clock.monotonic_s()

    def judged(self, measured: Measured, *, lr: float) -> None:
        self._judged_s = self._clock.monotonic_s()
        self._parts |= {
            "lr": lr,
            "forward_backward_s": measured.forward_backward_s,
            "exchange_s": self._judged_s - self._judge_s - self._parts["save_s"],
        }

    def applied(self) -> None:
        self._parts["update_s"] = self._clock.monotonic_s() - self._judged_s

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        started_s = self._clock.monotonic_s()
        yield
        self._parts[part] += self._clock.monotonic_s() - started_s

    def add(self, part: str, duration_s: float) -> None:
        self._parts[part] += duration_s

    def end(self, *, num_live_tokens: int) -> dict[str, float]:
        """The fields of StepReport that are times, rates or the learning rate."""
        step_s = self._clock.monotonic_s() - self._began_s
        training_s = step_s - self._parts["save_s"] - self._parts["evaluate_s"]
        return {**self._parts, "step_s": step_s, "tokens_per_s": num_live_tokens / training_s if training_s > 0 else 0.0}
