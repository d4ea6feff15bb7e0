"""Warm-up and decay that are proposed, and why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError
from surefoot.plan.tuning.schedules import propose_schedule


def test_the_flagship() -> None:
    schedule = propose_schedule(654_652, n=41.5e9, tokens_per_step=1488 * 4096)
    assert schedule.kind == "wsd"
    assert schedule.warmup_steps == 6810  # 41.5e9 tokens: 1% of the run
    assert schedule.decay_steps == 65_465
    assert {"warmup_steps", "decay_steps", "decay_shape", "final_ratio", "kind"} == set(schedule.reasons)
    assert all(reason.source for reason in schedule.reasons.values())


def test_short_runs_decay_for_a_fifth() -> None:
    assert propose_schedule(1000, n=1e6, tokens_per_step=1e5).decay_steps == 200


def test_which_bound_holds_is_said() -> None:
    by_size = propose_schedule(10_000, n=1e8, tokens_per_step=1e6)
    assert (by_size.warmup_steps, "as many tokens" in by_size.reasons["warmup_steps"].why) == (100, True)
    by_share = propose_schedule(10_000, n=1e12, tokens_per_step=1e6)
    assert (by_share.warmup_steps, "twentieth" in by_share.reasons["warmup_steps"].why) == (500, True)
    by_adam = propose_schedule(10_000, n=1e6, tokens_per_step=1e6)
    assert (by_adam.warmup_steps, "beta2" in by_adam.reasons["warmup_steps"].why) == (40, True)


def test_cosine_has_no_decay_of_its_own() -> None:
    schedule = propose_schedule(10_000, n=1e9, tokens_per_step=1e6, kind="cosine")
    assert (schedule.decay_steps, schedule.final_ratio) == (0, 0.1)
    assert "cut short" in schedule.reasons["kind"].why


@settings(max_examples=40)
@given(st.integers(1, 10**7), st.floats(1e6, 1e12), st.floats(1e3, 1e8), st.floats(0.9, 0.999))
def test_both_fit_into_the_run(steps: int, n: float, tokens_per_step: float, beta2: float) -> None:
    schedule = propose_schedule(steps, n=n, tokens_per_step=tokens_per_step, beta2=beta2)
    assert 0 <= schedule.warmup_steps <= steps
    assert 0 <= schedule.decay_steps <= steps - schedule.warmup_steps


def test_no_run() -> None:
    with pytest.raises(ConfigError):
        propose_schedule(0, n=1e9, tokens_per_step=1e6)
