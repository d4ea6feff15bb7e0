"""Best sizes per budget from runs of a known surface, and budgets in which none is to be seen."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surefoot.core.errors import DataError
from surefoot.plan.fits.isoflop import Optimum, budgets_of, fit_isoflop, law_through
from surefoot.plan.surface_record import Surface

SYMMETRIC = Surface(E=1.8, A=480.0, B=480.0, alpha=0.35, beta=0.35)
LEANING = Surface(E=1.8, A=300.0, B=5e5, alpha=0.25, beta=0.65)
BUDGETS = (1e18, 1e19, 1e20, 1e21)
FIVE = (0.25, 0.5, 1.0, 2.0, 4.0)


def sweep(
    surface: Surface = SYMMETRIC,
    *,
    budgets: tuple[float, ...] = BUDGETS,
    noise: float = 0.0,
    factors: tuple[float, ...] = FIVE,
    uneven: float = 0.0,
    seed: int = 5,
) -> np.ndarray:
    """[3, rows]: n, flops, loss; `factors` from the best size of each budget, each run `uneven` off its budget at most."""
    generator = np.random.default_rng(seed)
    rows = []
    for flops in budgets:
        for factor in factors:
            n, spent = surface.best_n(flops) * factor, flops * math.exp(generator.uniform(-uneven, uneven))
            rows.append((n, spent, surface.loss(n, spent / (6.0 * n)) + generator.normal(0.0, noise)))
    return np.array(rows).T


def optimum(flops: float, n: float, *, std: float) -> Optimum:
    return Optimum(flops=flops, n=n, tokens=flops / (6.0 * n), loss=2.0, log_n_std=std, num_points=5)


def plain_parabolas(n: np.ndarray, flops: np.ndarray, loss: np.ndarray) -> list[float]:
    """The control: the vertex of least squares alone, over all runs of a budget."""
    found = []
    for rows in budgets_of(flops):
        curve, slope, _ = np.polyfit(np.log(n[rows]), loss[rows], 2)
        found.append(math.exp(-slope / (2.0 * curve)))
    return found


def test_the_laws_of_a_symmetric_surface_come_back() -> None:
    found = fit_isoflop(*sweep())
    assert found.a == pytest.approx(0.5, abs=1e-6)
    assert (found.token_law.exponent, found.ratio_law.exponent) == pytest.approx((0.5, 0.0), abs=1e-6)
    assert [one.n for one in found.optima] == pytest.approx([SYMMETRIC.best_n(flops) for flops in BUDGETS], rel=1e-6)
    assert found.optima[0].tokens == pytest.approx(1e18 / 6.0 / found.optima[0].n)
    assert found.n_law(1e24) * found.token_law(1e24) == pytest.approx(1e24 / 6.0)
    assert found.ratio_law(1e24) == pytest.approx(found.token_law(1e24) / found.n_law(1e24))
    assert (found.left_out, found.largest_flops) == ((), 1e21)


@pytest.mark.parametrize("off", [0.6, 1.0, 1.7])
def test_a_surface_that_leans_does_not_move_the_minima_as_it_moves_plain_parabolas(off: float) -> None:
    n, flops, loss = sweep(LEANING, factors=tuple(off * factor for factor in FIVE))
    wanted = [LEANING.best_n(budget) for budget in BUDGETS]
    assert [one.n for one in fit_isoflop(n, flops, loss).optima] == pytest.approx(wanted, rel=0.01)
    assert max(abs(math.log(found / best)) for found, best in zip(plain_parabolas(n, flops, loss), wanted, strict=True)) > 0.03


def test_one_bad_run_does_not_decide_its_budget() -> None:
    n, flops, loss = sweep(noise=0.0005, factors=(0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0))
    loss[9 + 6] *= 1.05
    wanted = SYMMETRIC.best_n(1e19)
    assert fit_isoflop(n, flops, loss).optima[1].n == pytest.approx(wanted, rel=0.05)
    assert abs(math.log(plain_parabolas(n, flops, loss)[1] / wanted)) > 0.15


def test_runs_that_are_a_few_per_cent_off_their_budget_are_one_budget() -> None:
    found = fit_isoflop(*sweep(uneven=0.04))
    assert len(found.optima) == len(BUDGETS)
    assert [one.n for one in found.optima] == pytest.approx([SYMMETRIC.best_n(one.flops) for one in found.optima], rel=0.08)
    assert found.a == pytest.approx(0.5, abs=0.02)


def test_compute_that_differs_by_rounding_is_one_budget_and_twice_is_two() -> None:
    assert [rows.tolist() for rows in budgets_of(np.array([2e18, 1.01e18, 1e18, 2.03e18]))] == [[2, 1], [0, 3]]
    around = np.exp(np.random.default_rng(0).uniform(-0.08, 0.08, (3, 20))) * np.array([[1e18], [1.5e18], [3e18]])
    assert [len(rows) for rows in budgets_of(around.ravel())] == [20, 20, 20]


def test_bands_hold_the_truth_about_as_often_as_they_say_and_grow_with_noise() -> None:
    held, widths = 0, []
    for seed in range(40):
        low, high = fit_isoflop(*sweep(noise=0.002, seed=seed)).n_law.exponent_band
        held += low <= 0.5 <= high
        widths.append(high - low)
    assert held >= 34
    low, high = fit_isoflop(*sweep(noise=0.0005)).n_law.exponent_band
    assert low < 0.5 < high
    assert high - low < min(widths)


def test_tokens_that_are_not_those_of_six_n_d_have_a_law_of_their_own() -> None:
    n, flops, loss = sweep()
    found = fit_isoflop(n, flops, loss, tokens=flops / (9.0 * n))
    assert found.token_law(1e20) == pytest.approx(1e20 / (9.0 * found.n_law(1e20)))


def test_the_errors_of_tokens_are_those_of_sizes_turned_round() -> None:
    found = fit_isoflop(*sweep(noise=0.002))
    for n, tokens, ratio in zip(found.n_law.values(1e23), found.token_law.values(1e23), found.ratio_law.values(1e23), strict=True):
        assert n * tokens == pytest.approx(1e23 / 6.0, rel=1e-3)
        assert ratio == pytest.approx(tokens / n, rel=1e-3)


def test_a_budget_without_a_minimum_is_left_out_and_says_why() -> None:
    n, flops, loss = sweep(budgets=(1e18, 1e19, 1e20, 1e21, 1e22))
    of_last = np.log(n / SYMMETRIC.best_n(1e22))
    few = (flops == 1e20) & (n < 1.5 * SYMMETRIC.best_n(1e20))
    loss = np.where((flops == 1e21) & (n < SYMMETRIC.best_n(1e21) / 3), 1.0, loss)
    loss = np.where(flops == 1e22, 2.0 - of_last, loss)
    keep = (flops != 1e20) | few
    found = fit_isoflop(n[keep], flops[keep], loss[keep])
    assert [one.flops for one in found.optima] == [1e18, 1e19]
    assert [(budget.flops, budget.why.split(",")[0]) for budget in found.left_out] == [
        (1e20, "3 sizes within a factor 16 of the best"),
        (1e21, "the lowest loss is at the smallest size"),
        (1e22, "the lowest loss is at the largest size"),
    ]


def test_where_sizes_are_far_apart_the_nearest_are_taken() -> None:
    found = fit_isoflop(*sweep(factors=(1 / 64, 1 / 8, 0.4, 1.0, 2.5, 8.0, 64.0)))
    assert [one.num_points for one in found.optima] == [5] * 4
    assert found.a == pytest.approx(0.5, abs=1e-3)


def test_repeated_sizes_count_as_runs_and_not_as_sizes() -> None:
    n, flops, loss = sweep()
    twice = fit_isoflop(np.tile(n, 2), np.tile(flops, 2), np.tile(loss, 2))
    assert (twice.optima[0].num_points, twice.left_out) == (10, ())
    three = np.tile(np.flatnonzero(n / SYMMETRIC.best_n(1e18) < 1.5), 3)
    with pytest.raises(DataError, match="3 sizes within a factor 16"):
        fit_isoflop(n[three], flops[three], loss[three])


def test_one_budget_is_no_law() -> None:
    with pytest.raises(DataError, match="1 budgets have a minimum"):
        fit_isoflop(*sweep(budgets=(1e18,)))


def test_equal_losses_have_no_minimum() -> None:
    n, flops, loss = sweep()
    with pytest.raises(DataError, match="0 budgets have a minimum"):
        fit_isoflop(n, flops, np.full_like(loss, 2.5))


def test_an_uncertain_budget_weighs_less() -> None:
    sure = [optimum(flops, flops**0.5, std=0.01) for flops in (1e18, 1e20, 1e22)]
    assert law_through([*sure, optimum(1e21, 3e10 * 4, std=3.0)]).exponent == pytest.approx(0.5, abs=1e-3)
    assert law_through([*sure, optimum(1e21, 3e10 * 4, std=0.01)]).exponent > 0.51
