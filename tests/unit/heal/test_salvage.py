"""Whether what a bad stretch got into may be kept: only where the frozen loss is where a clean run's would be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.heal.contamination import SALVAGE_SIGMAS, Salvage, salvage

NOISE = 0.001
BEFORE = [(step, 3.0 - step * 1e-5 + NOISE * sign) for step, sign in zip(range(100, 900, 100), [1, -1, 0, 1, -1, 1, 0, -1], strict=True)]


def _salvage(*after: float) -> Salvage:
    return salvage([*BEFORE, *((900 + 100 * index, loss) for index, loss in enumerate(after))], first_step=850)


def test_what_is_where_it_should_be_may_be_kept() -> None:
    found = _salvage(3.0 - 900e-5, 3.0 - 1000e-5)
    assert found.may_be_kept
    assert found.largest_sigmas is not None
    assert abs(found.largest_sigmas) < 1
    assert "may be kept, if its cause is known and over" in found.reason


def test_one_evaluation_above_the_path_is_enough_to_go_back() -> None:
    found = _salvage(3.0 - 900e-5, 3.0 - 1000e-5 + 10 * NOISE)
    assert not found.may_be_kept
    assert found.largest_sigmas is not None
    assert found.largest_sigmas > SALVAGE_SIGMAS


def test_below_the_path_is_no_harm() -> None:
    assert _salvage(2.9).may_be_kept


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_is_never_kept(loss: float) -> None:
    assert not _salvage(3.0 - 900e-5, loss).may_be_kept


@pytest.mark.parametrize(("first_step", "told"), [(350, "3 times before step 350 and 5 times since"), (2000, "8 times before")])
def test_without_evaluations_on_both_sides_nothing_is_proposed(first_step: int, told: str) -> None:
    found = salvage(BEFORE, first_step=first_step)
    assert not found.may_be_kept
    assert told in found.reason
    assert "too few" in found.reason


@given(seed=st.integers(0, 2**32 - 1), rise=st.floats(0.0, 1.0))
def test_a_higher_loss_is_never_kept_where_a_lower_one_is_not(seed: int, rise: float) -> None:
    noise = np.random.default_rng(seed).normal(scale=NOISE, size=9)
    path = [(100 * index, 3.0 + float(value)) for index, value in enumerate(noise)]
    low, high = (salvage([*path[:-1], (800, path[-1][1] + more)], first_step=750) for more in (0.0, rise))
    assert low.may_be_kept or not high.may_be_kept
