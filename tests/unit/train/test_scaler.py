"""How the loss scale moves: a pure function, branch by branch and over random histories."""

from __future__ import annotations

import math
import random

import pytest

from surefoot.core.sections import DataSection, RunConfig, TrainSection
from surefoot.train.scaler import DynamicScaler, ScaleRules, ScaleState, after_step, build_scaler, rules_of

RULES = ScaleRules(initial=64.0, minimum=2.0, growth_interval_steps=3, hysteresis=1)


def scales(history: str, rules: ScaleRules = RULES) -> list[float]:
    """Of the steps of `history`: "o" overflowed, "." was taken."""
    state, found = ScaleState(rules.initial), []
    for step in history:
        state = after_step(state, overflowed=step == "o", rules=rules)
        found.append(state.scale)
    return found


def test_an_overflow_halves_and_good_steps_in_a_row_double() -> None:
    assert scales("o") == [32.0]
    assert scales("...") == [64.0, 64.0, 128.0]
    assert scales("......") == [64.0, 64.0, 128.0, 128.0, 128.0, 256.0]
    assert scales("..o..") == [64.0, 64.0, 32.0, 32.0, 32.0]  # the row begins anew


def test_it_never_falls_below_the_smallest_and_leaves_it_again() -> None:
    assert scales("ooooooo...") == [32.0, 16.0, 8.0, 4.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0]


def test_hysteresis_forgives_the_first_overflow_after_a_growth() -> None:
    forgiving = ScaleRules(initial=64.0, minimum=2.0, growth_interval_steps=3, hysteresis=2)
    assert scales("o.o..o", forgiving) == [64.0, 64.0, 32.0, 32.0, 32.0, 16.0]
    assert scales("oo...oo", forgiving) == [64.0, 32.0, 32.0, 32.0, 64.0, 64.0, 32.0]


@pytest.mark.parametrize("seed", range(20))
def test_over_any_history_it_is_a_power_of_two_that_moves_by_one_at_a_time(seed: int) -> None:
    draw = random.Random(seed)
    rules = ScaleRules(2.0 ** draw.randint(0, 20), 2.0 ** draw.randint(-10, 0), draw.randint(1, 5), draw.randint(1, 3))
    state = ScaleState(rules.initial)
    for _ in range(300):
        overflowed = draw.random() < 0.3
        following = after_step(state, overflowed=overflowed, rules=rules)
        assert math.frexp(following.scale)[0] == 0.5
        assert following.scale >= rules.minimum
        assert following.scale / state.scale in ((0.5, 1.0) if overflowed else (1.0, 2.0))
        assert 0 <= following.num_good < rules.growth_interval_steps
        state = following


def test_a_scaler_that_comes_back_moves_as_one_that_never_left() -> None:
    draw = random.Random(5)
    history = [draw.random() < 0.2 for _ in range(60)]
    one = DynamicScaler(RULES)
    for number, overflowed in enumerate(history):
        if number % 7 == 3:
            other = DynamicScaler(RULES)
            other.load_state_dict(one.state_dict())
            assert other.state_dict() == one.state_dict()
            one = other
        one.update(overflowed=overflowed)
    whole = scales("".join("o" if overflowed else "." for overflowed in history))
    assert one.scale == whole[-1]
    assert len(set(whole)) > 3  # the control: it moved


def test_no_state_begins_at_the_initial_scale() -> None:
    scaler = DynamicScaler(RULES)
    scaler.update(overflowed=True)
    scaler.load_state_dict({})
    assert scaler.scale == RULES.initial
    assert not scaler.at_minimum


def test_settings_are_for_a_mean_and_the_scale_is_for_the_sum_over_an_atom() -> None:
    rules = rules_of(TrainSection(precision="fp16", micro_batch_size=3), seq_len=100)  # 300 tokens: 256
    assert rules.initial == 65_536.0 / 256
    assert rules.minimum == 1.0 / 256
    assert rules_of(TrainSection(precision="fp16", micro_batch_size=1), seq_len=2).initial == 32_768.0


def test_only_fp16_has_one() -> None:
    assert build_scaler(RunConfig()) is None
    assert build_scaler(RunConfig(train=TrainSection(precision="bf16"))) is None
    scaler = build_scaler(RunConfig(train=TrainSection(precision="fp16", micro_batch_size=4), data=DataSection(seq_len=256)))
    assert scaler is not None
    assert scaler.scale == 64.0
