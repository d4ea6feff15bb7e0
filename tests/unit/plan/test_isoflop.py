"""Best sizes per budget from runs of a known surface, and budgets in which none is to be seen."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.core.errors import DataError
from surefoot.plan.isoflop import Optimum, budgets_of, fit_isoflop, law_through
from surefoot.plan.surface import Surface

SYMMETRIC = Surface(E=1.8, A=480.0, B=480.0, alpha=0.35, beta=0.35)
BUDGETS = (1e18, 1e19, 1e20, 1e21)


def sweep(
    budgets: tuple[float, ...] = BUDGETS, *, noise: float = 0.0, factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
) -> np.ndarray:
    """[3, rows]: n, flops, loss; `factors` from the best size of each budget."""
    generator = np.random.default_rng(5)
    rows = []
    for flops in budgets:
        for factor in factors:
            n = SYMMETRIC.best_n(flops) * factor
            rows.append((n, flops, SYMMETRIC.loss(n, flops / (6.0 * n)) + generator.normal(0.0, noise)))
    return np.array(rows).T


def optimum(flops: float, n: float, *, std: float) -> Optimum:
    return Optimum(flops=flops, n=n, tokens=flops / (6.0 * n), loss=2.0, log_n_std=std, num_points=5)


def test_the_law_of_a_symmetric_surface_comes_back() -> None:
    found = fit_isoflop(*sweep())
    assert found.a == pytest.approx(0.5, abs=1e-3)
    assert [optimum.n for optimum in found.optima] == pytest.approx([SYMMETRIC.best_n(flops) for flops in BUDGETS], rel=0.01)
    assert found.optima[0].tokens == pytest.approx(1e18 / 6.0 / found.optima[0].n)
    assert not found.left_out


def test_bands_hold_the_truth_and_grow_with_noise() -> None:
    little, much = (fit_isoflop(*sweep(noise=noise)).n_law.exponent_band for noise in (0.0005, 0.005))
    assert little[0] < 0.5 < little[1]
    assert much[1] - much[0] > little[1] - little[0]


def test_a_budget_without_a_minimum_is_left_out_and_says_why() -> None:
    n, flops, loss = sweep()
    sees_one_side = (flops == 1e20) & (n < 1.5 * SYMMETRIC.best_n(1e20))
    keep = (flops != 1e20) | sees_one_side
    loss = np.where((flops == 1e21) & (n < SYMMETRIC.best_n(1e21) / 3), 1.0, loss)
    found = fit_isoflop(n[keep], flops[keep], loss[keep])
    assert [optimum.flops for optimum in found.optima] == [1e18, 1e19]
    assert [(budget.flops, budget.why.split(",")[0]) for budget in found.left_out] == [
        (1e20, "3 sizes within a factor 16 of the best"),
        (1e21, "the lowest loss is at the smallest size"),
    ]


def test_one_budget_is_no_law() -> None:
    with pytest.raises(DataError, match="1 budgets have a minimum"):
        fit_isoflop(*sweep((1e18,)))


def test_compute_that_differs_by_rounding_is_one_budget() -> None:
    assert [rows.tolist() for rows in budgets_of(np.array([2e18, 1.01e18, 1e18, 2.03e18]))] == [[2, 1], [0, 3]]


def test_an_uncertain_budget_weighs_less() -> None:
    sure = [optimum(flops, flops**0.5, std=0.01) for flops in (1e18, 1e20, 1e22)]
    assert law_through([*sure, optimum(1e21, 3e10 * 4, std=3.0)]).exponent == pytest.approx(0.5, abs=1e-3)
    assert law_through([*sure, optimum(1e21, 3e10 * 4, std=0.01)]).exponent > 0.51
