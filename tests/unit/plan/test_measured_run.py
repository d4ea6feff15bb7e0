from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from surefoot.plan.rerun.measured_run import pace_of, restarts_of

START = datetime(2026, 1, 1, tzinfo=UTC)


def row(step: int, *, at_s: float, generation: int = 1, **more: Any) -> dict[str, Any]:
    plain = {"step_s": 2.0, "num_live_tokens": 1000, "saved": None, "save_s": 0.0, "evaluate_s": None}
    return {**plain, "step": step, "generation": generation, "time_utc": START + timedelta(seconds=at_s), **more}


def test_nothing_is_known_before_a_step() -> None:
    assert pace_of([]) is None
    assert restarts_of([]).restart_s is None


def test_saves_and_evaluations_do_not_slow_the_pace() -> None:
    rows = [row(step, at_s=2.0 * step) for step in range(1, 10)]
    rows += [row(10, at_s=30.0, step_s=9.0, save_s=7.0), row(11, at_s=60.0, step_s=30.0, evaluate_s=28.0, saved="s10-a1")]
    pace = pace_of(rows)
    assert pace is not None
    assert (pace.step_s, pace.tokens_per_s, pace.stall_s, pace.num_saves, pace.num_steps) == (2.0, 500.0, 7.0, 1, 9)


def test_a_run_that_saves_at_each_step_has_a_pace_too() -> None:
    pace = pace_of([row(step, at_s=2.0 * step, saved=f"s{step - 1}-a1", save_s=0.5) for step in range(1, 4)])
    assert pace is not None
    assert pace.step_s == 2.0


def test_an_interruption_costs_the_gap_and_the_steps_done_again() -> None:
    rows = [row(step, at_s=2.0 * step) for step in range(1, 8)] + [row(5, at_s=34.0, generation=2), row(6, at_s=36.0, generation=2)]
    restarts = restarts_of(rows)
    assert restarts.restart_s == pytest.approx(34.0 - 14.0 - 2.0)
    assert (restarts.lost_steps, restarts.num) == (3.0, 1)
    assert restarts_of(rows[:7]).num == 0
