"""Bands hold the truth about as often as they say, however few points there are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surefoot.plan.bands import band
from surefoot.plan.fits.line import fit_line

NUM_TRIALS = 300


def coverage(num_points: int, *, sigma: float, stated: float | None) -> float:
    """How often the band of a slope of 0.5 holds it, with errors of `sigma` of which `stated` was known."""
    generator = np.random.default_rng(7)
    x = np.linspace(0.0, 3.0, num_points)
    design = np.stack([np.ones_like(x), x], axis=1)
    std = None if stated is None else np.full(num_points, stated)
    held = 0
    for trial in range(NUM_TRIALS):
        line = fit_line(design, 1.0 + 0.5 * x + generator.normal(0.0, sigma, num_points), std=std, seed=trial, num_draws=200)
        low, high = band(line.draws[:, 1])
        held += low <= 0.5 <= high
    return held / NUM_TRIALS


@pytest.mark.parametrize("num_points", [4, 12])
def test_ninety_five_in_a_hundred_without_stated_errors(num_points: int) -> None:
    assert 0.91 <= coverage(num_points, sigma=0.1, stated=None) <= 0.98


@pytest.mark.parametrize("num_points", [3, 6])
def test_stated_errors_are_believed_and_doubted_where_points_scatter_more(num_points: int) -> None:
    assert coverage(num_points, sigma=0.1, stated=0.1) >= 0.92
    assert coverage(num_points, sigma=0.2, stated=0.1) >= 0.8
    assert coverage(num_points, sigma=0.01, stated=0.1) == 1.0


def test_normal_quantiles_would_be_too_narrow_for_four_points() -> None:
    """The control of the first test: what two degrees of freedom cost is that the scatter is hardly known."""
    generator = np.random.default_rng(7)
    x = np.linspace(0.0, 3.0, 4)
    design = np.stack([np.ones_like(x), x], axis=1)
    held = 0
    for _ in range(NUM_TRIALS):
        y = 0.5 * x + generator.normal(0.0, 0.1, 4)
        line = fit_line(design, y, num_draws=1)
        scatter = math.sqrt(float(np.sum((y - design @ line.coefficients) ** 2)) / 2.0)
        held += abs(line.coefficients[1] - 0.5) <= 1.96 * scatter / math.sqrt(float(np.sum((x - x.mean()) ** 2)))
    assert held / NUM_TRIALS < 0.88


def test_weights_are_of_the_inverse_error() -> None:
    x = np.array([0.0, 1.0, 2.0, 3.0])
    y = np.array([0.0, 1.0, 2.0, 9.0])
    design = np.stack([np.ones_like(x), x], axis=1)
    assert fit_line(design, y, std=np.array([1.0, 1.0, 1.0, 1e6])).coefficients == pytest.approx([0.0, 1.0], abs=1e-6)
    assert fit_line(design, y, std=np.ones(4)).coefficients[1] > 2.0


def test_a_band_is_of_finite_draws() -> None:
    assert band([1.0, 2.0, math.inf, math.nan, 3.0]) == pytest.approx((1.05, 2.95))
