"""What compute buys at its best sizes."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.plan.bands import band
from surefoot.plan.fits.best_loss import fit_best_loss
from surefoot.plan.surface_record import Surface

SURFACE = Surface(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)
BUDGETS = np.geomspace(1e18, 1e22, 9)
LOSSES = np.array([SURFACE.loss(SURFACE.best_n(c), c / (6.0 * SURFACE.best_n(c))) for c in BUDGETS])


def test_the_loss_along_the_best_sizes_of_a_surface_comes_back() -> None:
    law = fit_best_loss(BUDGETS.tolist(), LOSSES.tolist())
    assert law is not None
    assert (law.exponent, law.E) == pytest.approx((0.35 * 0.37 / 0.72, 1.8), abs=0.01)
    best = SURFACE.best_n(1e24)
    assert law(1e24) == pytest.approx(SURFACE.loss(best, 1e24 / (6.0 * best)), abs=0.003)


def test_the_band_grows_with_distance_and_holds_the_truth() -> None:
    noisy = LOSSES + np.random.default_rng(1).normal(0.0, 0.003, len(LOSSES))
    law = fit_best_loss(BUDGETS.tolist(), noisy.tolist())
    assert law is not None
    near, far = band(law.values(1e22)), band(law.values(1e25))
    assert far[1] - far[0] > 2.0 * (near[1] - near[0])
    best = SURFACE.best_n(1e25)
    assert far[0] < SURFACE.loss(best, 1e25 / (6.0 * best)) < far[1]


def test_three_budgets_or_a_loss_that_does_not_fall_tell_nothing() -> None:
    assert fit_best_loss(BUDGETS[:3].tolist(), LOSSES[:3].tolist()) is None
    assert fit_best_loss(BUDGETS.tolist(), LOSSES[::-1].tolist()) is None
