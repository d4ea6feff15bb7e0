"""The loss surface from points whose constants are known, and the ways in which a fit is told to be wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import huber

from surefoot.core.errors import DataError
from surefoot.plan.fits.surface import CONSTANTS, fit_surface, summary_of, without_highest
from surefoot.plan.surface_record import Points, Surface

HOFFMANN = Surface(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)


def huber_sum(surface: Surface, points: Points) -> float:
    """The objective that is published: the sum of Huber losses, delta 1e-3, of the error of log loss."""
    return float(huber(1e-3, np.log(surface.losses(points)) - np.log(points.loss)).sum())


def points_on(surface: Surface, n: np.ndarray, tokens: np.ndarray, *, noise: float = 0.0, seed: int = 3) -> Points:
    exact = surface.losses(Points(n, tokens, np.ones_like(n)))
    return Points(n, tokens, exact * np.exp(np.random.default_rng(seed).normal(0.0, noise, len(n))))


def scattered(surface: Surface, *, noise: float, num_rows: int = 60, seed: int = 3) -> Points:
    """Sizes of 30M to 10B on 3 to 300 tokens a parameter."""
    generator = np.random.default_rng(seed)
    n = np.exp(generator.uniform(math.log(3e7), math.log(1e10), num_rows))
    return points_on(surface, n, n * np.exp(generator.uniform(math.log(3.0), math.log(300.0), num_rows)), noise=noise, seed=seed)


def swept(surface: Surface, *, noise: float, seed: int = 3) -> Points:
    """Six budgets of nine sizes each, up to 4 times from the best."""
    rows = [(surface.best_n(c) * f, c) for c in np.geomspace(1e18, 1e22, 6) for f in np.geomspace(0.25, 4.0, 9)]
    n, flops = np.array(rows).T
    return points_on(surface, n, flops / (6.0 * n), noise=noise, seed=seed)


surfaces = st.builds(
    lambda floor, alpha, beta, of_n, of_tokens: Surface(floor, of_n * 1e9**alpha, of_tokens * 2e10**beta, alpha, beta),
    st.floats(1.0, 2.5),
    st.floats(0.2, 0.6),
    st.floats(0.2, 0.6),
    st.floats(0.15, 1.0),
    st.floats(0.15, 1.0),
)
"""The last two are the nats that 1B parameters and 20B tokens lack."""


@settings(max_examples=5, deadline=None)
@given(surfaces)
def test_drawn_constants_come_back(wanted: Surface) -> None:
    found = fit_surface(swept(wanted, noise=0.0), num_draws=0)
    for name in (*CONSTANTS, "a"):
        assert getattr(found.surface, name) == pytest.approx(getattr(wanted, name), rel=1e-5), name
    assert found.objective < 1e-12
    assert found.held_out is not None
    assert found.held_out.max < 1e-6


@settings(max_examples=5, deadline=None)
@given(surfaces, st.integers(0, 1000))
def test_a_little_noise_moves_them_by_less_than_three_per_cent(wanted: Surface, seed: int) -> None:
    found = fit_surface(scattered(wanted, noise=1e-4, seed=seed, num_rows=100), num_draws=0).surface
    for name in CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=0.03), name


def test_a_tenth_of_the_rows_may_be_wrong() -> None:
    """What the Huber loss is for: runs that diverged, or were read off a plot badly."""
    points = scattered(HOFFMANN, noise=0.0)
    loss = points.loss.copy()
    loss[::10] *= 1.05
    found = fit_surface(Points(points.n, points.tokens, loss), num_draws=0).surface
    assert (found.E, found.alpha, found.beta) == pytest.approx((1.69, 0.34, 0.28), rel=0.03)


def test_bands_hold_the_truth_and_grow_with_noise() -> None:
    little, much = (fit_surface(scattered(HOFFMANN, noise=noise), num_draws=40) for noise in (0.001, 0.01))
    for name in ("E", "alpha", "beta", "a"):
        low, high = little.bands[name]
        assert low < getattr(HOFFMANN, name) < high
        assert high - low < much.bands[name][1] - much.bands[name][0]


def test_the_objective_is_that_of_the_surface() -> None:
    points = scattered(HOFFMANN, noise=0.01)
    found = fit_surface(points, num_draws=0)
    assert found.objective == pytest.approx(huber_sum(found.surface, points), rel=1e-9)
    assert found.objective < huber_sum(HOFFMANN, points)


def test_the_same_seed_gives_the_same_bands() -> None:
    points = scattered(HOFFMANN, noise=0.01)
    assert fit_surface(points, num_draws=5, seed=1).bands == fit_surface(points, num_draws=5, seed=1).bands
    assert fit_surface(points, num_draws=5, seed=1).bands != fit_surface(points, num_draws=5, seed=2).bands


def test_whole_budgets_are_held_out() -> None:
    found = fit_surface(swept(HOFFMANN, noise=0.001), num_draws=0)
    assert found.held_out is not None
    assert found.held_out.num_rows == 9
    assert found.held_out.from_flops == pytest.approx(1e22)
    assert found.largest_flops == pytest.approx(1e22)


def test_a_surface_that_bends_is_seen_in_what_was_held_out() -> None:
    points = swept(HOFFMANN, noise=0.0)
    bent = Points(points.n, points.tokens, np.where(points.flops > 5e21, 1.03 * points.loss, points.loss))
    held_out = fit_surface(bent, num_draws=0).held_out
    assert held_out is not None
    assert held_out.mean == pytest.approx(0.03 / 1.03, rel=0.05)


def test_few_runs_have_no_bands() -> None:
    few = scattered(HOFFMANN, noise=0.001, num_rows=9)
    assert fit_surface(few, num_draws=3).bands == {}
    repeated = few.take(np.repeat(np.arange(9), 3))
    assert fit_surface(repeated, num_draws=3).draws == ()
    assert fit_surface(scattered(HOFFMANN, noise=0.001, num_rows=10), num_draws=3).bands


def test_the_condition_tells_runs_that_vary_apart_from_runs_that_hardly_do() -> None:
    n = np.geomspace(1e8, 1e10, 40)
    ratio = np.exp(np.random.default_rng(0).normal(math.log(20.0), 0.1, 40))
    together = fit_surface(points_on(HOFFMANN, n, n * ratio), num_draws=0).condition
    assert fit_surface(scattered(HOFFMANN, noise=0.001), num_draws=0).condition < 60.0 < 100.0 < together


def test_the_highest_losses_can_be_left_out() -> None:
    points = Points(np.arange(1.0, 6.0), np.ones(5), np.array([2.0, 5.0, 3.0, 5.0, 4.0]))
    assert without_highest(points, 0).tolist() == [0, 1, 2, 3, 4]
    assert without_highest(points, 2).tolist() == [0, 2, 4]


def test_errors_in_one_line() -> None:
    assert summary_of([-0.03, 0.01, 0.0, 0.02]) == pytest.approx({"rms": math.sqrt(0.00035), "median": 0.015, "max": 0.03})


@pytest.mark.parametrize(
    ("points", "what"),
    [
        (scattered(HOFFMANN, noise=0.0, num_rows=5), "5 different runs do not determine 5 constants"),
        (scattered(HOFFMANN, noise=0.0, num_rows=5).take(np.arange(40) % 5), "5 different runs do not determine 5 constants"),
        (points_on(HOFFMANN, np.resize([1e8, 1e9], 20), np.geomspace(1e9, 1e11, 20)), "2 sizes and 20 numbers of tokens"),
        (points_on(HOFFMANN, np.full(20, 1e9), np.geomspace(1e9, 1e11, 20)), "1 sizes and"),
        (points_on(HOFFMANN, np.geomspace(1e8, 1e10, 20), 20 * np.geomspace(1e8, 1e10, 20)), "about 20 each"),
        (Points(np.geomspace(1e8, 1e10, 20), np.tile([1e9, 1e10, 1e11, 1e12], 5), np.full(20, 2.5)), "all losses are 2.5"),
    ],
)
def test_too_little_is_refused(points: Points, what: str) -> None:
    with pytest.raises(DataError, match=what):
        fit_surface(points, num_draws=0)


@pytest.mark.parametrize(("without", "named"), [("A", "parameters"), ("B", "tokens")])
def test_losses_that_do_not_fall_with_one_of_them_are_refused(without: str, named: str) -> None:
    flat = Surface(**{**{name: getattr(HOFFMANN, name) for name in CONSTANTS}, without: 0.0})
    with pytest.raises(DataError, match=f"do not fall with {named}"):
        fit_surface(scattered(flat, noise=0.0), num_draws=0)


def test_the_best_size_is_where_the_loss_of_a_budget_is_least() -> None:
    best = HOFFMANN.best_n(1e21)
    losses = [HOFFMANN.loss(n, 1e21 / (6.0 * n)) for n in (0.98 * best, best, 1.02 * best)]
    assert losses[1] == min(losses)
