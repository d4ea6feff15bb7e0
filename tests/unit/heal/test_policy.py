from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest

from surefoot.core.records import Action, Asks, Finding, Health, Pause, Proceed, RankSignals, Redo, RollBack, Signals, SkipUpdate, Verdict
from surefoot.core.sections import HealSection
from surefoot.heal.policy import HealState, Situation, decide, heal_state_from_json

SECTION = HealSection()
FRESH = HealState()
ALONE = Situation()


def signals(*, step: int = 10, loss: float = 2.0, grad_norm: float = 0.5, num_live_tokens: int = 100) -> Signals:
    return Signals(
        step=step,
        attempt=1,
        generation=1,
        loss=loss,
        num_live_tokens=num_live_tokens,
        grad_norm=grad_norm,
        num_nonfinite=0,
        leave_requested=False,
        save_requested=False,
        save_clock_s=0.0,
        save_stall_s=0.0,
        save_slot_free=True,
        block_requested=False,
        ranks=(RankSignals(0, loss * num_live_tokens, num_live_tokens, 0.0, 0.0, 0.0, 0.0),),
    )


def finding(rule: str, asks: Asks, *, onset: int = 11) -> Finding:
    return Finding(rule, asks, f"{rule} speaks", onset)


def verdict(*findings: Finding) -> Verdict:
    against = next((found for found in findings if found.asks is Asks.SKIP), None)
    first = against or (findings[0] if findings else None)
    health = Health.BAD if against else Health.SUSPECT if findings else Health.HEALTHY
    return Verdict(health, first.rule if first else "", first.reason if first else "", {}, findings)


def act(
    given: Verdict,
    state: HealState = FRESH,
    *,
    of: Signals | None = None,
    section: HealSection = SECTION,
    situation: Situation = ALONE,
    max_grad_norm: float = 1.0,
    divisor: float = 1.0,
) -> tuple[Action, HealState]:
    return decide(
        of or signals(), given, state, section=section, situation=situation, max_grad_norm=max_grad_norm, gradient_divisor=divisor
    )


def test_a_small_gradient_is_only_divided_by_the_live_tokens() -> None:
    assert act(verdict()) == (Proceed(clip_scale=1.0 / 100), FRESH)


def test_a_large_gradient_is_clipped_as_torch_does() -> None:
    action, _ = act(verdict(), of=signals(grad_norm=4.0))
    assert isinstance(action, Proceed)
    assert math.isclose(action.clip_scale * 100, 1.0 / (4.0 + 1e-6))


def test_clipping_is_off_at_zero_and_the_divisor_is_undone() -> None:
    assert act(verdict(), of=signals(grad_norm=4.0), max_grad_norm=0.0, divisor=2.0)[0] == Proceed(clip_scale=2.0 / 100)


def test_an_ill_step_is_computed_again_where_it_can_be_and_nothing_is_counted_yet() -> None:
    action, state = act(verdict(finding("outlier_loss", Asks.SKIP)), situation=replace(ALONE, can_redo=True))
    assert isinstance(action, Redo)
    assert (action.rule, action.rotation, state) == ("recheck", 0, FRESH)


def test_an_ill_step_is_skipped_by_name_and_marked() -> None:
    action, state = act(verdict(finding("outlier_loss", Asks.SKIP)))
    assert action == SkipUpdate("outlier_loss", "outlier_loss speaks")
    assert (state.in_a_row, state.marks) == (1, (11,))


def test_an_empty_batch_is_a_no_op_that_neither_counts_nor_ends_a_row() -> None:
    before = HealState(in_a_row=2, marks=(9, 10))
    assert act(Verdict(Health.SUSPECT, "no_live_tokens", "empty"), before) == (SkipUpdate("no_live_tokens", "empty"), before)


def test_the_breaker_pauses_at_the_third_in_a_row() -> None:
    state = FRESH
    for step in (10, 11):
        action, state = act(verdict(finding("nonfinite", Asks.SKIP)), state, of=signals(step=step))
        assert isinstance(action, SkipUpdate)
    action, state = act(verdict(finding("nonfinite", Asks.SKIP)), state, of=signals(step=12))
    assert isinstance(action, Pause)
    assert (action.rule, state.marks) == ("breaker", (11, 12, 13))
    assert "3 steps in a row" in action.reason


def test_a_healthy_step_ends_a_row() -> None:
    _, state = act(verdict(), HealState(in_a_row=2, marks=(9, 10)))
    assert (state.in_a_row, state.marks) == (0, (9, 10))


def test_the_breaker_pauses_at_five_of_a_hundred_and_not_when_they_are_farther_apart() -> None:
    for apart, broken in ((24, True), (26, False)):
        state, action = FRESH, None
        for number in range(5):
            action, state = act(verdict(finding("outlier_loss", Asks.SKIP)), replace(state, in_a_row=0), of=signals(step=number * apart))
        assert isinstance(action, Pause) is broken


def test_fp16_that_looks_for_its_scale_is_no_illness_but_is_at_the_smallest_one() -> None:
    back_off = Verdict(Health.BAD, "loss_scale_backoff", "too large")
    assert act(back_off) == (SkipUpdate("loss_scale_backoff", "too large"), FRESH)
    _, state = act(back_off, situation=replace(ALONE, at_minimum_scale=True))
    assert state.in_a_row == 1


def test_one_vote_is_none_and_two_of_one_tier_are_one() -> None:
    action, state = act(verdict(finding("sustained_loss", Asks.ROLL_BACK, onset=5)))
    assert isinstance(action, Proceed)
    action, state = act(verdict(finding("sustained_loss_slow", Asks.ROLL_BACK, onset=6)), state, of=signals(step=20))
    assert isinstance(action, Proceed)
    assert len(state.votes) == 1


def test_two_tiers_that_agree_go_back_to_before_the_earliest_onset() -> None:
    _, state = act(verdict(finding("sustained_loss", Asks.ROLL_BACK, onset=5)))
    action, after = act(verdict(finding("grad_level", Asks.ROLL_BACK, onset=8)), state, of=signals(step=20))
    assert isinstance(action, RollBack)
    assert (action.to_step, action.mode, action.rule, after.votes) == (4, "diagnose", "grad_level, sustained_loss", ())


def test_votes_that_lie_too_far_apart_do_not_agree() -> None:
    _, state = act(verdict(finding("sustained_loss", Asks.ROLL_BACK)))
    action, _ = act(verdict(finding("grad_level", Asks.ROLL_BACK)), state, of=signals(step=10 + SECTION.agree_steps))
    assert isinstance(action, Proceed)


def test_a_comparison_of_bits_needs_no_second_tier() -> None:
    action, _ = act(verdict(finding("replica_differs", Asks.ROLL_BACK, onset=7)))
    assert isinstance(action, RollBack)
    assert action.to_step == 6


def test_skip_at_once_goes_farther_back_and_leaves_out_batches_from_the_onset_on() -> None:
    section = replace(SECTION, rollback="skip_at_once", back_steps=3, skip_steps=4)
    action, _ = act(verdict(finding("replica_differs", Asks.ROLL_BACK, onset=8)), section=section)
    assert action == RollBack(4, "skip", "replica_differs", "replica_differs since step 8", 8, 4)


def test_the_classic_preset_goes_back_as_the_books_do() -> None:
    section = replace(SECTION, preset="classic", back_steps=3)
    action, _ = act(verdict(finding("loss_n_sigma", Asks.ROLL_BACK, onset=8)), section=section)
    assert isinstance(action, RollBack)
    assert (action.mode, action.to_step) == ("skip", 4)


def test_the_budget_ends_in_a_pause() -> None:
    situation = replace(ALONE, num_rollbacks=SECTION.max_rollbacks)
    action, _ = act(verdict(finding("replica_differs", Asks.ROLL_BACK)), situation=situation)
    assert isinstance(action, Pause)
    assert (action.rule, action.onset_step) == ("rollback_budget", 11)


@pytest.mark.parametrize("section", [replace(SECTION, rollback="off"), replace(SECTION, dry_run=True)])
def test_roll_backs_can_be_off(section: HealSection) -> None:
    assert isinstance(act(verdict(finding("replica_differs", Asks.ROLL_BACK)), section=section)[0], Proceed)


def test_a_dry_run_lets_all_through_but_what_is_not_finite() -> None:
    section = replace(SECTION, dry_run=True)
    assert isinstance(act(verdict(finding("outlier_loss", Asks.SKIP)), section=section)[0], Proceed)
    assert isinstance(act(verdict(finding("norm_100x_mean_1000", Asks.PAUSE)), section=section)[0], Proceed)
    assert isinstance(act(verdict(finding("nonfinite", Asks.SKIP)), of=signals(loss=math.nan), section=section)[0], SkipUpdate)


def test_what_asks_for_a_pause_gets_it() -> None:
    action, _ = act(verdict(finding("norm_100x_mean_1000", Asks.PAUSE)))
    assert action == Pause("norm_100x_mean_1000", "norm_100x_mean_1000 speaks", 11)


@pytest.mark.parametrize("rule", ["no_live_tokens", "loss_scale_backoff"])
def test_what_an_audit_found_counts_in_a_step_that_is_none(rule: str) -> None:
    given = Verdict(Health.SUSPECT, rule, "empty, or too large", findings=(finding("replica_differs", Asks.ROLL_BACK, onset=7),))
    assert isinstance(act(given)[0], RollBack)


def test_an_open_episode_judges_for_itself() -> None:
    action, _ = act(verdict(finding("replica_differs", Asks.ROLL_BACK)), situation=replace(ALONE, in_episode=True))
    assert isinstance(action, Proceed)


def test_the_state_survives_json_and_older_checkpoints_are_read() -> None:
    _, state = act(verdict(finding("sustained_loss", Asks.ROLL_BACK), finding("outlier_loss", Asks.SKIP)))
    assert heal_state_from_json(state.as_json()) == state != FRESH
    assert heal_state_from_json({"skips_in_a_row": 2}) == HealState(in_a_row=2)


@pytest.mark.parametrize("of", [signals(loss=math.nan), signals(grad_norm=math.inf), replace(signals(), num_nonfinite=1)])
@pytest.mark.parametrize("asks", [None, *Asks])
@pytest.mark.parametrize("rollback", ["diagnose", "skip_at_once", "off"])
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("in_episode", [False, True])
def test_nothing_lets_an_update_through_that_is_not_finite(
    of: Signals, asks: Asks | None, rollback: Literal["diagnose", "skip_at_once", "off"], dry_run: bool, in_episode: bool
) -> None:
    given = verdict(finding("nonfinite", asks)) if asks is not None else verdict()
    section = replace(SECTION, rollback=rollback, dry_run=dry_run)
    action, _ = act(given, of=of, section=section, situation=replace(ALONE, in_episode=in_episode))
    assert not action.proceeds
