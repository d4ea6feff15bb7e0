"""The draws behind the bands of the law `epoch`, and the constants of `epoch` and `porian`, against the runs that they are from."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy.special import huber

from surefoot.plan.bands import band
from surefoot.plan.fits.surface import Points, Surface, fit_surface
from surefoot.plan.sizing.epoch_draws import epoch_draws
from surefoot.plan.sizing.laws import Power
from surefoot.plan.sizing.published import EPOCH, HOFFMANN, law

FLAGSHIP = 1.026e24


def huber_sum(surface: Surface, points: Points) -> float:
    """The objective that is published: the sum of Huber losses, delta 1e-3, of the error of log loss."""
    return float(huber(1e-3, np.log(surface.losses(points)) - np.log(points.loss)).sum())


def epoch_points(folder: Path) -> Points:
    """The 240 runs below the 5th highest loss."""
    with (folder / "chinchilla_epoch_svg_extracted.csv").open() as file:
        rows = list(csv.DictReader(file))
    n, flops, loss = (np.array([float(row[name]) for row in rows]) for name in ("Model Size", "Training FLOP", "loss"))
    kept = loss < np.sort(loss)[-5]
    return Points(n[kept], (flops / (6 * n))[kept], loss[kept])


def test_the_constants_are_at_the_bottom(planning_data: Path) -> None:
    points = epoch_points(planning_data)
    assert huber_sum(EPOCH, points) == pytest.approx(1.018274e-3, rel=1e-5)
    assert huber_sum(HOFFMANN, points) > 1.1e-3


def test_new_draws_spread_as_the_stored_ones(planning_data: Path) -> None:
    """60 fits to other resampled rows. Standard errors of quantiles of so few are about a tenth of the width."""
    drawn = fit_surface(epoch_points(planning_data), num_draws=60, seed=17).draws
    stored = epoch_draws()

    def spread(draws: tuple[Surface, ...], name: str) -> float:
        return float(np.std([getattr(draw, name) for draw in draws]))

    for name in ("E", "alpha", "beta"):
        assert spread(drawn, name) == pytest.approx(spread(stored, name), rel=0.4), name
    new, old = (band(np.log(draw.best_n(FLAGSHIP)) for draw in draws) for draws in (drawn, stored))
    assert new == pytest.approx(old, abs=0.3 * (old[1] - old[0]))


def test_budgets_that_the_law_was_fitted_to(planning_data: Path) -> None:
    flops = epoch_points(planning_data).flops
    assert law("epoch").flops_range == pytest.approx((float(flops.min()), float(flops.max())), rel=0.01)


def test_nine_tenths_of_the_runs_have_ordinary_ratios(planning_data: Path) -> None:
    points = epoch_points(planning_data)
    assert float(np.quantile(points.tokens / points.n, 0.9)) == pytest.approx(103, abs=3)


def test_porian_is_the_published_fit(planning_data: Path) -> None:
    with (planning_data / "porian_published_fits_rw.csv").open() as file:
        row = next(
            row for row in csv.DictReader(file) if (row["hparams"], row["decay"], row["param_count"]) == ("tuned", "const", "standard")
        )
    rule = law("porian").rule
    assert isinstance(rule, Power)
    assert (rule.coef, rule.exponent) == pytest.approx((float(row["n_coef"]), float(row["a_n_exponent"])), rel=1e-5)
    exponents = [draw.exponent for draw in law("porian").draws if isinstance(draw, Power)]
    assert band(exponents) == pytest.approx((float(row["ci_lo"]), float(row["ci_hi"])), abs=1.5e-3)  # theirs is a little lopsided
