"""Whether a run has gone silent, read from its folder by somebody who is no part of it: the run is gone, or only what tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.events import Event
from surefoot.core.holder import seconds_between
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.live import read_live
from surefoot.report.status import status_of

Silence = Literal["none", "run-gone", "telemetry-gone"]


@dataclass(frozen=True, slots=True)
class Signs:
    """What was seen. Ages in seconds, None where there is nothing to be of an age. `is_expected`: finished, halted, paused, held or
    stopped by a person."""

    is_expected: bool
    lock_is_held: bool
    live_age_s: float | None
    step_age_s: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    silence: Silence
    reason: str


def judge_silence(signs: Signs, *, silent_s: float) -> Finding:
    """Pure. A run that goes on makes steps; one that only restores, saves or evaluates is told by its live record.

    What dies at once leaves a live record and a last step of about the same age: only steps that went on for half of `silent_s` without a
    record say that the record alone is gone.
    """
    if signs.is_expected:
        return Finding("none", "nothing is expected of it: it is finished, or a person's turn has come")
    live_age_s, step_age_s = signs.live_age_s, signs.step_age_s
    if live_age_s is not None and live_age_s <= silent_s:
        return Finding("none", f"its live record is {live_age_s:.0f} s old")
    if step_age_s is not None and step_age_s <= silent_s:
        if live_age_s is not None and live_age_s - step_age_s <= silent_s / 2:
            return Finding("none", f"its last step is {step_age_s:.0f} s old")
        return Finding("telemetry-gone", f"steps go on, the last {step_age_s:.0f} s ago, but its live record is {_age(live_age_s)}")
    if signs.lock_is_held and live_age_s is None and step_age_s is None:
        return Finding("none", "it is starting")
    held = "held" if signs.lock_is_held else "not held by a live process"
    return Finding("run-gone", f"the last step is {_age(step_age_s)}, its live record {_age(live_age_s)}, its lock {held}")


def signs_of(run_dir: Path, *, clock: Clock | None = None) -> tuple[Signs, dict[str, Any]]:
    """The signs, and the answer of `surefoot status` that they were taken from. Never writes. Raises ConfigError where no run is."""
    clock = clock or SystemClock()
    status = status_of(run_dir, clock=clock)
    live = read_live(run_dir)
    live_age_s = max(0.0, seconds_between(live.updated_utc, clock.utc())) if live else None
    is_expected = bool(status["finished"]) or status["halted"] is not None or _is_stopped(run_dir)
    return Signs(is_expected, status["pid"] is not None, live_age_s, status["last_step_age_s"]), status


def _is_stopped(run_dir: Path) -> bool:
    """Whether a person's `surefoot stop` was the last word, which the next start takes back. A signal is none: schedulers send it."""
    entries = read_ledger(run_dir / LEDGER_NAME, up_to_damage=True)
    asked = (entry for entry in reversed(entries) if entry.event in (Event.ORDER_TAKEN, Event.GENERATION_STARTED))
    newest = next(asked, None)
    return newest is not None and newest.event == Event.ORDER_TAKEN and newest.fields.get("verb") == "stop"


def _age(age_s: float | None) -> str:
    return "missing" if age_s is None else f"{age_s:.0f} s old"
