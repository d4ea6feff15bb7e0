from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from surefoot.monitor.spikes import Outcome, SpikeWatch, follow, open_watch, outcome, rebound, watch_from_json

SIGMA = 0.03


def level(step: int) -> float:
    return 3.0 - 2e-5 * step


def noisy(value: float, *, seed: int) -> float:
    return value + SIGMA * float(np.random.default_rng(seed).standard_t(5.0))


def watched(onset_step: int = 1000) -> SpikeWatch:
    watch = open_watch([noisy(level(step), seed=step) for step in range(onset_step - 512, onset_step)], onset_step=onset_step, rule="x")
    assert watch is not None
    return watch


def series(excess: Callable[[int], float], *, num: int = 600) -> list[tuple[int, float]]:
    return [(1000 + age, noisy(level(1000 + age) + excess(age), seed=age)) for age in range(num)]


def became(excess: Callable[[int], float]) -> tuple[Outcome, int]:
    """The first outcome that is not open, and its step."""
    watch = watched()
    for step, loss in series(excess):
        watch = follow(watch, step=step, loss=loss)
        if (told := outcome(watch, decide_steps=200)) != "open":
            return told, step
    raise AssertionError("still open")


@pytest.mark.parametrize(
    ("excess", "answer", "by"),
    [
        (lambda age: 3.0 if age < 6 else 0.0, "recovered", (1050, 1100)),
        (lambda age: 2.0 * math.exp(-age / 15.0), "recovered", (1100, 1200)),
        (lambda age: 2.0 * math.exp(-age / 300.0), "recovering", (1200, 1200)),
        (lambda age: 0.5, "diverged", (1200, 1200)),
        (lambda age: 0.002 * age, "diverged", (1200, 1200)),
        (lambda age: 0.1, "diverged", (1200, 1200)),
    ],
    ids=["spike", "decay", "slow decay", "step", "ramp", "small step"],
)
def test_what_becomes_of_a_spike(excess: Callable[[int], float], answer: str, by: tuple[int, int]) -> None:
    told, step = became(excess)
    assert told == answer
    assert by[0] <= step <= by[1]


def test_five_per_cent_away_is_not_back() -> None:
    assert became(lambda age: 0.04 * level(1000))[0] == "diverged"


def test_it_is_open_until_then_and_what_is_not_finite_enters_nothing() -> None:
    watch = watched()
    for step, _ in series(lambda age: 0.0, num=100):
        watch = follow(watch, step=step, loss=math.nan)
        assert outcome(watch, decide_steps=200) == "open"
    assert watch.losses == ()


def test_a_fall_that_flattens_is_no_divergence() -> None:
    """A line through the steep start of a run foretells less than nothing; what stands where it stood is well."""
    losses = [6.0 * math.exp(-step / 60.0) + 0.4 + 0.01 * math.sin(step) for step in range(600)]
    watch = open_watch(losses[:200], onset_step=200, rule="x")
    assert watch is not None
    assert abs(watch.level - losses[185]) < 0.1
    for step in range(200, 400):
        watch = follow(watch, step=step, loss=losses[step])
    assert outcome(watch, decide_steps=200) == "recovered"
    assert open_watch([3.0] * 10, onset_step=10, rule="x") is None


def test_it_goes_on_from_json() -> None:
    watch = watched()
    for step, loss in series(lambda age: 1.0, num=50):
        back = watch_from_json(json.loads(json.dumps(watch.to_json())))
        assert back == watch
        watch = follow(back, step=step, loss=loss)


def test_a_rebound_after_a_resume() -> None:
    before = [noisy(3.0, seed=step) for step in range(100)]
    after = [noisy(3.0, seed=1000 + step) for step in range(50)]
    assert rebound(before, after, resume_step=100) is None
    found = rebound(before, [loss + 0.1 for loss in after], resume_step=100)
    assert found is not None
    assert (found.rule, found.onset_step) == ("rebound", 101)
    assert rebound(before, [loss - 0.1 for loss in after], resume_step=100) is None
    assert rebound(before, [5.0] * 10, resume_step=100) is None
