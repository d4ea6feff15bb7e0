"""The loss surface from points whose constants are known, and the two ways in which a fit is told to be wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError
from surefoot.plan.surface import Points, Surface, fit_surface, huber_sum

HOFFMANN = Surface(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)


def drawn(surface: Surface, *, noise: float, num_rows: int = 60, seed: int = 3) -> Points:
    """Sizes of 30M to 10B on 3 to 300 tokens a parameter."""
    generator = np.random.default_rng(seed)
    n = np.exp(generator.uniform(math.log(3e7), math.log(1e10), num_rows))
    tokens = n * np.exp(generator.uniform(math.log(3.0), math.log(300.0), num_rows))
    points = Points(n, tokens, np.ones(num_rows))
    return Points(n, tokens, surface.losses(points) * np.exp(generator.normal(0.0, noise, num_rows)))


@settings(max_examples=8, deadline=None)
@given(st.floats(1.2, 2.2), st.floats(0.25, 0.45), st.floats(0.25, 0.5), st.floats(0.2, 1.0), st.floats(0.2, 1.0))
def test_constants_come_back(loss: float, alpha: float, beta: float, of_n: float, of_tokens: float) -> None:
    """`of_n` and `of_tokens` are nats that 1B parameters and 20B tokens lack."""
    wanted = Surface(E=loss, A=of_n * 1e9**alpha, B=of_tokens * 2e10**beta, alpha=alpha, beta=beta)
    found = fit_surface(drawn(wanted, noise=0.0), num_draws=0)
    for name in ("E", "A", "B", "alpha", "beta", "a"):
        assert getattr(found.surface, name) == pytest.approx(getattr(wanted, name), rel=1e-3), name
    assert found.objective < 1e-12
    assert found.held_out is not None
    assert found.held_out.max < 1e-6


def test_a_tenth_of_the_rows_may_be_wrong() -> None:
    """What the Huber loss is for: runs that diverged, or were read off a plot badly."""
    points = drawn(HOFFMANN, noise=0.0)
    loss = points.loss.copy()
    loss[::10] *= 1.05
    found = fit_surface(Points(points.n, points.tokens, loss), num_draws=0).surface
    assert (found.E, found.alpha, found.beta) == pytest.approx((1.69, 0.34, 0.28), rel=0.03)


def test_bands_hold_the_truth_and_grow_with_noise() -> None:
    little, much = (fit_surface(drawn(HOFFMANN, noise=noise), num_draws=60) for noise in (0.001, 0.01))
    for name in ("E", "alpha", "beta", "a"):
        low, high = little.bands[name]
        assert low < getattr(HOFFMANN, name) < high
        assert high - low < much.bands[name][1] - much.bands[name][0]


def test_the_objective_is_that_of_the_surface() -> None:
    points = drawn(HOFFMANN, noise=0.01)
    found = fit_surface(points, num_draws=0)
    assert found.objective == pytest.approx(huber_sum(found.surface, points), rel=1e-9)
    assert found.objective < huber_sum(HOFFMANN, points)


def test_the_same_seed_gives_the_same_bands() -> None:
    points = drawn(HOFFMANN, noise=0.01)
    assert fit_surface(points, num_draws=5, seed=1).bands == fit_surface(points, num_draws=5, seed=1).bands


def test_the_best_size_is_where_the_loss_of_a_budget_is_least() -> None:
    best = HOFFMANN.best_n(1e21)
    losses = [HOFFMANN.loss(n, 1e21 / (6.0 * n)) for n in (0.98 * best, best, 1.02 * best)]
    assert losses[1] == min(losses)


@pytest.mark.parametrize(
    ("rows", "what"),
    [(range(5), "5 different runs do not determine 5 constants"), (range(0, 60, 1), "2 sizes and")],
)
def test_too_little_is_refused(rows: range, what: str) -> None:
    points = drawn(HOFFMANN, noise=0.0)
    if "sizes" in what:
        points = Points(np.where(points.n > 1e9, 1e9, 1e8), points.tokens, points.loss)
    with pytest.raises(DataError, match=what):
        fit_surface(points.take(np.array(rows)))
