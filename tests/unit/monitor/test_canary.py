from __future__ import annotations

import json
import math

import numpy as np
import pytest

from surefoot.core.records import Asks, Finding
from surefoot.core.sections import CanarySection
from surefoot.monitor.canary import CanaryState, canary_from_json, hear, whose

SECTION = CanarySection()


def listen(
    losses: list[float], *, state: CanaryState | None = None, first: int = 100, loss_is_high: bool = True, classic: bool = False
) -> tuple[CanaryState, list[tuple[int, Finding]]]:
    state, told = state or CanaryState(), []
    rules = {"canary_2sigma_500": Asks.ALERT} if classic else {"canary_rise": Asks.ROLL_BACK, "canary_apart": Asks.ALERT}
    for index, loss in enumerate(losses):
        step = first + 100 * index
        state, findings = hear(state, step=step, loss=loss, section=SECTION, loss_is_high=loss_is_high, rules=rules)
        told += [(step, finding) for finding in findings]
    return state, told


def test_learning_and_its_noise_are_silent() -> None:
    noise = np.random.default_rng(1).normal(0.0, 0.0008, 400)
    losses = (3.0 + 2.0 / np.sqrt(1.0 + np.arange(400)) + noise).tolist()
    assert not listen(losses)[1]


def test_two_in_a_row_above_the_best_speak_from_the_last_good_one_on_and_go_on_speaking() -> None:
    state, told = listen([3.1, 3.0, 3.004, 3.001, 3.01, 3.02, 3.03])
    assert [(step, finding.rule, finding.asks, finding.onset_step) for step, finding in told] == [
        (600, "canary_rise", Asks.ROLL_BACK, 401),
        (700, "canary_rise", Asks.ROLL_BACK, 401),
    ]
    assert state.is_up
    assert not listen([2.99], state=state, first=800)[0].is_up


def test_a_boundary_is_a_new_best() -> None:
    state, _ = listen([3.0, 3.0])
    for step in (300, 400, 500):
        state, findings = hear(state, step=step, loss=3.2, section=SECTION, rebased=step == 300)
        assert not findings


def test_up_while_the_training_loss_looks_normal_asks_for_an_audit() -> None:
    _, told = listen([3.0, 3.1, 3.1], loss_is_high=False)
    assert [(finding.rule, finding.asks) for _, finding in told] == [("canary_rise", Asks.ROLL_BACK), ("canary_apart", Asks.ALERT)]
    assert told[1][1].evidence["audit"] is True


def test_a_loss_that_is_not_finite_is_up_at_once_and_no_best() -> None:
    state, told = listen([3.0, math.nan])
    assert [finding.rule for _, finding in told] == ["canary_rise"]
    json.dumps(told[0][1].evidence, allow_nan=False)
    assert state.best == 3.0
    assert math.isnan(listen([math.nan])[0].best)


@pytest.mark.parametrize(
    ("is_up", "loss_is_high", "answer"),
    [(False, True, "data"), (True, True, "model"), (True, False, "corruption"), (False, False, "none")],
)
def test_whose_it_is(is_up: bool, loss_is_high: bool, answer: str) -> None:
    assert whose(CanaryState(3.0, 100, is_up=is_up), loss_is_high) == answer


def test_the_classic_rule_pages_for_learning_and_stays_silent_on_a_ramp() -> None:
    learning = [3.0, 2.99, 3.0, 2.99, 3.0, 2.9]
    assert [finding.rule for _, finding in listen(learning, classic=True)[1]] == ["canary_2sigma_500"]
    assert not listen([3.0 + 0.01 * index for index in range(40)], classic=True)[1]
    assert listen([3.0 + 0.01 * index for index in range(40)])[1]


def test_it_goes_on_from_json() -> None:
    losses = [3.1, 3.0, 3.01, 3.02, 3.03]
    for cut in range(5):
        state, first = listen(losses[:cut])
        back = canary_from_json(json.loads(json.dumps(state.to_json())))
        _, second = listen(losses[cut:], state=back, first=100 + 100 * cut)
        assert first + second == listen(losses)[1]
    assert canary_from_json({}).good_step == -1
