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


@pytest.mark.parametrize("sigma", [0.0005, 0.001, 0.002, 0.0028, 0.03])
def test_a_long_flat_run_is_silent_however_noisy_its_set(sigma: float) -> None:
    """A margin above the lowest of 5,000 single evaluations speaks at 9 of 10 of them where the noise is as large as the margin."""
    noise = np.random.default_rng(round(1e5 * sigma)).normal(0.0, sigma, 5000)
    assert len(listen((3.0 + noise).tolist())[1]) <= 5


def test_noise_that_lingers_or_has_heavy_tails_hardly_speaks() -> None:
    generator = np.random.default_rng(7)
    lingering, last = [], 0.0
    for shock in generator.normal(0.0, 0.003, 2000).tolist():
        lingering.append(3.0 + (last := 0.3 * last + shock))
    assert len(listen(lingering)[1]) <= 10
    assert len(listen((3.0 + 0.003 * generator.standard_t(5.0, 2000)).tolist())[1]) <= 10


@pytest.mark.parametrize(("sigma", "most_steps"), [(0.0005, 400), (0.001, 500), (0.002, 700)])
@pytest.mark.parametrize("onset", [20, 150])
def test_a_slow_rise_of_a_learning_run_is_heard_early_and_late(sigma: float, most_steps: int, onset: int) -> None:
    evaluations = np.arange(onset + 30)
    delays = []
    for seed in range(5):
        noise = np.random.default_rng(seed).normal(0.0, sigma, len(evaluations))
        losses = 2.9 + 1.0 / np.sqrt(1.0 + evaluations + (0 if onset > 20 else 60)) + noise
        losses += 0.09 * np.clip((evaluations - onset) / 21.0, 0.0, 1.0)
        delays += [step - 100 * (onset + 1) for step, _ in listen(losses.tolist())[1]][:1]
    assert len(delays) == 5
    assert 0 < np.median(delays) <= most_steps


def test_two_in_a_row_above_the_best_speak_from_the_last_good_one_on_and_go_on_speaking() -> None:
    state, told = listen([3.1, 3.05, 3.03, 3.02, 3.01, 3.003, *[3.0] * 5, 3.004, 3.001, 3.2, 3.3, 3.4])
    assert [(step, finding.rule, finding.asks, finding.onset_step) for step, finding in told] == [
        (1500, "canary_rise", Asks.ROLL_BACK, 1301),
        (1600, "canary_rise", Asks.ROLL_BACK, 1301),
    ]
    assert state.is_up
    assert state.best == 3.0
    assert not listen([2.99], state=state, first=1700)[0].is_up


def test_a_young_canary_asks_for_one_more() -> None:
    assert [step for step, _ in listen([3.1, 3.0, 3.0, 3.1, 3.2, 3.3])[1]] == [600]


def test_a_boundary_is_a_new_best() -> None:
    state, _ = listen([3.0, 3.0])
    for step in (300, 400, 500):
        state, findings = hear(state, step=step, loss=3.2, section=SECTION, rebased=step == 300)
        assert not findings


def test_up_while_the_training_loss_looks_normal_asks_for_an_audit() -> None:
    _, told = listen([3.0, 3.0, 3.0, 3.1, 3.1, 3.1], loss_is_high=False)
    assert [(finding.rule, finding.asks) for _, finding in told] == [("canary_rise", Asks.ROLL_BACK), ("canary_apart", Asks.ALERT)]
    assert told[1][1].evidence["audit"] is True
    assert told[0][1].evidence["whose"] == "corruption"


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
    losses = [3.1, 3.02, 3.01, 3.003, 3.0, 3.001, 3.0, 3.0, 3.2, 3.3, 3.4]
    assert listen(losses)[1]
    for cut in range(len(losses)):
        state, first = listen(losses[:cut])
        back = canary_from_json(json.loads(json.dumps(state.to_json())))
        _, second = listen(losses[cut:], state=back, first=100 + 100 * cut)
        assert first + second == listen(losses)[1]
    assert canary_from_json({}).good_step == -1
