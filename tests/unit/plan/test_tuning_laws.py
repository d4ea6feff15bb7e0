"""Published laws of learning rate and batch at runs where their values are known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.plan.sizing.published import EPOCH
from surefoot.plan.tuning.laws import (
    LEARNING_RATES,
    Run,
    SideBySide,
    batches,
    critical_by_data,
    critical_by_loss,
    learning_rates,
    lr_for_batch,
    transferred_lr,
)


def value(found: SideBySide, law: str) -> float:
    return next(suggestion.value for suggestion in found.suggestions if suggestion.law == law)


@pytest.mark.parametrize(("n", "tokens", "lr", "batch"), [(7e9, 4.76e12, 1.35e-3, 10.1e6), (98.5e9, 1.74e12, 1.5e-4, 5.7e6)])
def test_step_law(n: float, tokens: float, lr: float, batch: float) -> None:
    assert value(learning_rates(Run(n, tokens)), "steplaw") == pytest.approx(lr, rel=0.03)
    assert value(batches(Run(n, tokens)), "steplaw") == pytest.approx(batch, rel=0.03)


def test_deepseek_at_1e24() -> None:
    run = Run(98.5e9, 1.026e24 / 6 / 98.5e9)
    assert value(learning_rates(run), "deepseek") == pytest.approx(3.1e-4, rel=0.01)
    assert value(batches(run), "deepseek") == pytest.approx(20.9e6, rel=0.01)


def test_the_flagship_side_by_side() -> None:
    run = Run(41.5e9, 3.99e12, EPOCH.loss(41.5e9, 3.99e12))
    rates, sizes = learning_rates(run), batches(run)
    assert rates.chosen.law == "steplaw"
    assert rates.chosen.value == pytest.approx(3.6e-4, rel=0.01)
    assert value(sizes, "mccandlish") == pytest.approx(8.0e6, rel=0.01)
    assert value(sizes, "steplaw") == pytest.approx(9.1e6, rel=0.02)
    assert value(sizes, "deepseek") == pytest.approx(20.7e6, rel=0.01)
    assert sizes.chosen.law == "steplaw"
    assert sizes.disagreement == pytest.approx(2.58, abs=0.02)


def test_below_the_grid_of_the_laws_the_smallest_is_taken() -> None:
    run = Run(3e5, 1e7)
    for found in (learning_rates(run), batches(run)):
        assert found.chosen.value == min(suggestion.value for suggestion in found.suggestions)
    assert learning_rates(run).chosen.law == "deepseek"


def test_they_disagree_by_up_to_four() -> None:
    assert learning_rates(Run(7e9, 4.76e12)).disagreement == pytest.approx(3.6, abs=0.1)
    assert batches(Run(98.5e9, 1.74e12, 1.9585)).disagreement == pytest.approx(3.7, abs=0.1)


def test_without_a_loss_there_is_no_law_of_it() -> None:
    assert "mccandlish" not in {suggestion.law for suggestion in batches(Run(1e9, 2e10)).suggestions}


def test_the_critical_batch_of_a_7b() -> None:
    """1 to 4 million tokens are often told for a loss of 2.0."""
    assert critical_by_loss(2.0) == pytest.approx(7.4e6, rel=0.01)


def test_three_fits_of_one_paper_meet_where_they_were_measured() -> None:
    """Zhang et al.: 93.20 N^0.47 at 20 tokens a parameter, 22.91 D^0.47, 621.34 N^0.087 at the data of 151M. Sequences, millions."""
    by_data = critical_by_data(20 * 151e6) / 512
    assert by_data == pytest.approx(93.20 * 151**0.47, rel=0.01)
    assert by_data == pytest.approx(621.34 * 151**0.087, rel=0.05)


@settings(max_examples=40)
@given(st.floats(1e7, 1e12), st.floats(1e9, 1e14))
def test_bands_hold_the_value_and_widen_with_distance(n: float, tokens: float) -> None:
    step_law = LEARNING_RATES[0]
    low, high = step_law.band(Run(n, tokens)) or (0.0, 0.0)
    assert low <= (step_law.value(Run(n, tokens)) or 0.0) <= high
    if n > 2.5e8 and tokens > 1.4e10:
        further = step_law.band(Run(10 * n, 10 * tokens)) or (0.0, 0.0)
        assert further[1] / further[0] > high / low


@settings(max_examples=40)
@given(st.floats(1e6, 1e12), st.floats(1e8, 1e14), st.floats(1.01, 100.0))
def test_more_data_is_a_larger_batch(n: float, tokens: float, factor: float) -> None:
    for few, many in zip(batches(Run(n, tokens)).suggestions, batches(Run(n, factor * tokens)).suggestions, strict=True):
        assert many.value > few.value


def test_rates_move_with_width_and_batch() -> None:
    assert transferred_lr(1e-2, width=256, to_width=4096) == pytest.approx(6.25e-4)
    assert lr_for_batch(4e-4, batch=8e6, to_batch=2e6) == pytest.approx(2e-4)
    assert lr_for_batch(4e-4, batch=8e6, to_batch=32e6) == 4e-4
