from __future__ import annotations

import math

import pytest

from surefoot.core.records import Action, Halt, Proceed, RankSignals, Signals, SkipUpdate
from surefoot.heal.policy import HealState, decide
from surefoot.monitor.verdict import judge


def signals(*, loss: float = 2.0, grad_norm: float = 0.5, num_live_tokens: int = 100, num_nonfinite: int = 0) -> Signals:
    return Signals(
        step=10,
        attempt=1,
        generation=1,
        loss=loss,
        num_live_tokens=num_live_tokens,
        grad_norm=grad_norm,
        num_nonfinite=num_nonfinite,
        leave_requested=False,
        save_requested=False,
        save_clock_s=0.0,
        save_stall_s=0.0,
        save_slot_free=True,
        block_requested=False,
        ranks=(RankSignals(0, loss * num_live_tokens, num_live_tokens, 0.0, 0.0, 0.0, 0.0),),
    )


def act(given: Signals, state: HealState = HealState(), *, max_grad_norm: float = 1.0, divisor: float = 1.0) -> tuple[Action, HealState]:  # noqa: B008
    return decide(given, judge(given), state, max_grad_norm=max_grad_norm, gradient_divisor=divisor, max_skips_in_a_row=3)


def test_a_small_gradient_is_only_divided_by_the_live_tokens() -> None:
    assert act(signals(grad_norm=0.5))[0] == Proceed(clip_scale=1.0 / 100)


def test_a_large_gradient_is_clipped_as_torch_does() -> None:
    action, _ = act(signals(grad_norm=4.0))
    assert isinstance(action, Proceed)
    assert math.isclose(action.clip_scale * 100, 1.0 / (4.0 + 1e-6))


def test_clipping_is_off_at_zero_and_the_divisor_is_undone() -> None:
    assert act(signals(grad_norm=4.0), max_grad_norm=0.0, divisor=2.0)[0] == Proceed(clip_scale=2.0 / 100)


@pytest.mark.parametrize(
    ("sick", "rule"),
    [
        (signals(num_nonfinite=1, grad_norm=math.nan), "nonfinite_gradient"),
        (signals(grad_norm=math.inf), "nonfinite_gradient"),
        (signals(loss=math.nan), "nonfinite_loss"),
    ],
)
def test_a_non_finite_step_is_skipped_by_name(sick: Signals, rule: str) -> None:
    action, state = act(sick)
    assert isinstance(action, SkipUpdate)
    assert action.rule == rule
    assert state == HealState(skips_in_a_row=1)


def test_an_empty_batch_is_a_no_op_that_counts_neither_way() -> None:
    action, state = act(signals(num_live_tokens=0, loss=0.0, grad_norm=0.0), HealState(skips_in_a_row=2))
    assert isinstance(action, SkipUpdate)
    assert state == HealState(skips_in_a_row=2)


def test_too_many_skips_in_a_row_halt_and_a_healthy_step_ends_the_row() -> None:
    assert isinstance(act(signals(loss=math.nan), HealState(skips_in_a_row=2))[0], SkipUpdate)
    assert isinstance(act(signals(loss=math.nan), HealState(skips_in_a_row=3))[0], Halt)
    assert act(signals(), HealState(skips_in_a_row=3))[1] == HealState()
