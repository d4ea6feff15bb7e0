"""Whether a run has gone silent, read from its folder by somebody who is no part of it: the run is gone, or only what tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.holder import seconds_between
from surefoot.observe.live import read_live
from surefoot.report.status import status_of

Silence = Literal["none", "run-gone", "telemetry-gone"]


@dataclass(frozen=True, slots=True)
class Signs:
    """What was seen. Ages in seconds, None where there is nothing to be of an age. `is_expected`: finished, halted, paused or held."""

    is_expected: bool
    lock_is_held: bool
    live_age_s: float | None
    step_age_s: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    silence: Silence
    reason: str


def judge_silence(signs: Signs, *, silent_s: float) -> Finding:
    """Pure. A run that goes on makes steps; one that only restores, saves or evaluates is told by its live record."""
    if signs.is_expected:
        return Finding("none", "nothing is expected of it: it is finished, or a person's turn has come")
    steps_go_on = signs.step_age_s is not None and signs.step_age_s <= silent_s
    live_goes_on = signs.live_age_s is not None and signs.live_age_s <= silent_s
    if live_goes_on and signs.lock_is_held:
        return Finding("none", f"its live record is {signs.live_age_s:.0f} s old")
    if steps_go_on:
        return Finding(
            "telemetry-gone", f"steps go on, the last {signs.step_age_s:.0f} s ago, but its live record is {_age(signs.live_age_s)}"
        )
    held = "held" if signs.lock_is_held else "not held by a live process"
    return Finding("run-gone", f"the last step is {_age(signs.step_age_s)}, its live record {_age(signs.live_age_s)}, its lock {held}")


def signs_of(run_dir: Path, *, clock: Clock | None = None) -> tuple[Signs, dict[str, Any]]:
    """The signs, and the answer of `surefoot status` that they were taken from. Never writes. Raises ConfigError where no run is."""
    clock = clock or SystemClock()
    status = status_of(run_dir, clock=clock)
    live = read_live(run_dir)
    live_age_s = max(0.0, seconds_between(live.updated_utc, clock.utc())) if live else None
    is_expected = bool(status["finished"]) or status["halted"] is not None
    return Signs(is_expected, status["pid"] is not None, live_age_s, status["last_step_age_s"]), status


def _age(age_s: float | None) -> str:
    return "missing" if age_s is None else f"{age_s:.0f} s old"
