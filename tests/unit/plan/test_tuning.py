"""Laws of learning rate and batch from sweeps of which the best value is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surefoot.core.errors import DataError
from surefoot.plan.fits.sweep_minimum import best_of_sweeps, sweeps_of
from surefoot.plan.fits.tuning import fit_tuning

SIZES = (6e7, 2e8, 1e9)
TOKENS = (2e9, 1e10, 5e10)


def best_lr(n: float, tokens: float) -> float:
    return float(1.79 * n**-0.713 * tokens**0.307)


def best_batch(tokens: float) -> float:
    return float(0.58 * tokens**0.571)


def swept(
    *, cells: list[tuple[float, float]] | None = None, noise: float = 0.0, rates: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """n, tokens, lr, loss: a parabola in log lr around the best of each cell, steeper above."""
    generator = np.random.default_rng(2)
    rows = []
    for n, tokens in cells or [(n, tokens) for n in SIZES for tokens in TOKENS]:
        for lr in rates if rates is not None else 2.0 ** np.arange(-14.0, -4.0):
            off = math.log(lr / best_lr(n, tokens))
            loss = 2.5 + 0.02 * off**2 + 0.004 * max(0.0, off) ** 3 + generator.normal(0.0, noise)
            rows.append((n, tokens, lr, loss))
    n, tokens, lr, loss = np.array(rows).T
    return n, tokens, lr, loss


def grid(*, tilt: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """n, tokens, lr, batch, loss: both varied, and the best rate moves with the batch where `tilt` is not 0."""
    rows = []
    for n in SIZES:
        for tokens in TOKENS:
            for lr in 2.0 ** np.arange(-14.0, -4.0):
                for batch in 2.0 ** np.arange(14.0, 24.0):
                    x, y = math.log(lr / best_lr(n, tokens)), math.log(batch / best_batch(tokens))
                    rows.append((n, tokens, lr, batch, 2.5 + 0.02 * x * x + 0.02 * y * y - tilt * 0.04 * x * y))
    n, tokens, lr, batch, loss = np.array(rows).T
    return n, tokens, lr, batch, loss


def test_a_learning_rate_law_comes_back() -> None:
    found = fit_tuning(*swept(), law="lr")
    assert (found.exponents["n"], found.exponents["tokens"]) == pytest.approx((-0.713, 0.307), abs=0.01)
    assert found(n=7e9, tokens=1e12) == pytest.approx(best_lr(7e9, 1e12), rel=0.1)
    assert (len(found.sweeps), found.left_out) == (9, ())
    assert max(found.held_out) < 1.1


def test_bands_hold_the_truth_and_grow_with_noise() -> None:
    little, much = (fit_tuning(*swept(noise=noise), law="lr") for noise in (0.0005, 0.01))
    for name, wanted in (("n", -0.713), ("tokens", 0.307)):
        low, high = little.bands[name]
        assert low < wanted < high
        assert much.bands[name][1] - much.bands[name][0] > high - low
    low, high = little.band_at(n=7e9, tokens=1e12)
    assert low < little(n=7e9, tokens=1e12) < high


@pytest.mark.parametrize("tilt", [0.0, 0.7])
def test_both_laws_come_back_from_one_grid(tilt: float) -> None:
    n, tokens, lr, batch, loss = grid(tilt=tilt)
    rate = fit_tuning(n, tokens, lr, loss, law="lr", also=batch)
    assert (rate.exponents["n"], rate.exponents["tokens"]) == pytest.approx((-0.713, 0.307), abs=1e-6)
    sizes = fit_tuning(n, tokens, batch, loss, law="batch", also=lr)
    assert sizes.exponents == pytest.approx({"tokens": 0.571}, abs=1e-6)
    assert sizes(tokens=1e12) == pytest.approx(best_batch(1e12), rel=1e-6)


def test_where_rate_and_batch_go_together_one_of_them_alone_is_off() -> None:
    """The control: the lowest loss of each rate over a grid of batches is jagged."""
    n, tokens, lr, _, loss = grid(tilt=0.7)
    alone = fit_tuning(n, tokens, lr, loss, law="lr").exponents["n"]
    assert abs(alone + 0.713) > 1e-3


@pytest.mark.parametrize(
    ("cells", "variables"),
    [
        ([(n, 1e10) for n in (*SIZES, 4e8)], {"n": -0.713}),
        ([(2e8, tokens) for tokens in (*TOKENS, 4e9)], {"tokens": 0.307}),
        ([(n, 20.0 * n) for n in (*SIZES, 4e8)], {"n": -0.713 + 0.307}),
    ],
)
def test_what_does_not_vary_apart_is_not_in_the_law(cells: list[tuple[float, float]], variables: dict[str, float]) -> None:
    assert fit_tuning(*swept(cells=cells), law="lr").exponents == pytest.approx(variables, abs=0.02)


def test_a_batch_follows_size_only_where_tokens_do_not_vary() -> None:
    n, tokens, value, loss = swept(cells=[(n, 1e10) for n in (*SIZES, 4e8)])
    assert set(fit_tuning(n, tokens, value, loss, law="batch").exponents) == {"n"}
    n, tokens, value, loss = swept()
    assert set(fit_tuning(n, tokens, value, loss, law="batch").exponents) == {"tokens"}


def test_a_sweep_with_its_best_at_an_end_is_left_out_by_name() -> None:
    rates = 2.0 ** np.arange(-12.0, -7.0)
    found = fit_tuning(*swept(rates=rates), law="lr")
    assert 0 < len(found.left_out) < 9
    for sweep in found.left_out:
        assert ("smallest" if best_lr(sweep.n, sweep.tokens) < 2.0**-11 else "largest") in sweep.why
    assert (found.exponents["n"], found.exponents["tokens"]) == pytest.approx((-0.713, 0.307), abs=0.05)


def test_runs_that_diverged_do_not_bend_the_parabola() -> None:
    n, tokens, lr, loss = swept()
    far = lr > 3.0 * np.array([best_lr(*cell) for cell in zip(n, tokens, strict=True)])
    found = fit_tuning(n, tokens, lr, np.where(far, 9.0, loss), law="lr")
    assert (found.exponents["n"], found.exponents["tokens"]) == pytest.approx((-0.713, 0.307), abs=0.03)


def test_whole_steps_of_different_batches_are_one_sweep() -> None:
    assert [rows.tolist() for rows in sweeps_of(np.array([1e9, 1e9, 2e9, 1e9]), np.array([1e10, 1.01e10, 1e10, 2e10]))] == [
        [0, 1],
        [2],
        [3],
    ]


def test_two_values_or_a_hill_have_no_best() -> None:
    ones = np.ones(5) * 1e9
    value = 2.0 ** np.arange(5.0)
    _, few = best_of_sweeps(ones[:2], ones[:2], value[:2], np.array([2.0, 3.0]))
    assert few[0].why == "2 values"
    _, hill = best_of_sweeps(ones, ones, value, np.array([2.001, 2.0, 2.04, 2.05, 2.05]))
    assert hill[0].why == "losses do not rise on both sides of the best value"


def test_too_few_sweeps_are_refused_with_the_reasons() -> None:
    rates = 2.0 ** np.arange(-18.0, -14.0)
    with pytest.raises(
        DataError, match=r"0 sweeps have their best value inside.*N 6e\+07, D 2e\+09: the lowest loss is at the largest value"
    ):
        fit_tuning(*swept(rates=rates), law="lr")
    with pytest.raises(DataError, match=r"3 sweeps .* a law of n and tokens needs 4"):
        fit_tuning(*swept(cells=[(6e7, 2e9), (6e7, 5e10), (1e9, 2e9)]), law="lr")
