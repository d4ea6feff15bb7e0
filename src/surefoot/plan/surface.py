"""The loss surface L(N, D) = E + A / N^alpha + B / D^beta of Hoffmann et al. (arXiv 2203.15556, approach 3), fitted to finished runs. Pure.

The objective is theirs: the *sum* of Huber losses, delta 1e-3, of the error of log L. It has a long curved valley, in which one descent
with the usual tolerances stops far from the bottom, as the published constants did. So there are many starts, and each is a good one: for given
exponents the best E, A, B of plain least squares are a linear problem (variable projection). N and D are measured from their geometric
means, which takes the condition of the problem from 1e11 to about 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from surefoot.core.errors import DataError
from surefoot.plan.law_records import Points as Points
from surefoot.plan.law_records import Surface as Surface

Floats = NDArray[np.float64]

HUBER_DELTA = 1e-3
"""Of the error of log loss; Hoffmann et al. chose it, and all later fits of these points kept it."""

STARTING_EXPONENTS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.75)
"""For each of both. What is published lies between 0.28 and 0.54."""

NUM_POLISHED = 6
"""Starts that are followed to the bottom: the best by variable projection."""

NUM_PARAMETERS = 5
NUM_DRAWS = 200
HELD_OUT_SHARE = 0.1
"""Of the rows, those with the largest budgets, to see how far the surface carries beyond what it was fitted to."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Relative errors of the loss at the `num_rows` largest budgets, of a surface fitted to the others."""

    num_rows: int
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class SurfaceFit:
    """`bands` are (2.5%, 97.5%) over draws of rows with replacement; `condition` is of the Jacobian at the optimum, columns of length 1."""

    surface: Surface
    objective: float
    condition: float
    residuals: Floats
    draws: tuple[Surface, ...]
    held_out: HeldOut | None

    @property
    def bands(self) -> dict[str, tuple[float, float]]:
        names = ("E", "A", "B", "alpha", "beta", "a")
        return {name: band([getattr(drawn, name) for drawn in self.draws]) for name in names} if self.draws else {}


def fit_surface(points: Points, *, num_draws: int = NUM_DRAWS, seed: int = 0) -> SurfaceFit:
    """Raises DataError where the points do not determine five constants."""
    _check(points)
    surface, objective, jacobian = _best(points, starts=None)
    centred = _centred(surface, points)
    generator = np.random.default_rng(seed)
    draws = tuple(
        _best(points.take(generator.integers(0, len(points), len(points))), starts=[centred], centre_of=points)[0] for _ in range(num_draws)
    )
    residuals: Floats = np.log(surface.losses(points)) - np.log(points.loss)
    return SurfaceFit(surface, objective, _condition(jacobian), residuals, draws, _held_out(points))


def band(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(values), (0.025, 0.975))
    return float(low), float(high)


def huber_sum(surface: Surface, points: Points) -> float:
    """The objective, as it is compared between fits."""
    error = np.abs(np.log(surface.losses(points)) - np.log(points.loss))
    parts = np.where(error <= HUBER_DELTA, error * error / 2.0, HUBER_DELTA * (error - HUBER_DELTA / 2.0))
    return float(parts.sum())


def _check(points: Points) -> None:
    what = ""
    if len(points) <= NUM_PARAMETERS:
        what = f"{len(points)} rows do not determine {NUM_PARAMETERS} constants"
    elif len(np.unique(points.n)) < 3 or len(np.unique(points.tokens)) < 3:
        what = f"{len(np.unique(points.n))} sizes and {len(np.unique(points.tokens))} numbers of tokens do not determine two exponents"
    if what:
        raise DataError(what, where="fit", hint="add runs: at least three sizes and three numbers of tokens, ten rows or more in all")


def _best(points: Points, *, starts: list[Floats] | None, centre_of: Points | None = None) -> tuple[Surface, float, Floats]:
    """The lowest end of all descents: surface, objective, and the Jacobian of log loss there by centred parameters."""
    centre = _centre(centre_of or points)
    x, y, log_loss = np.log(points.n) - centre[0], np.log(points.tokens) - centre[1], np.log(points.loss)

    def residuals(theta: Floats) -> Floats:
        error: Floats = np.log(_parts(theta, x, y).sum(axis=0)) - log_loss
        return error

    def jacobian(theta: Floats) -> Floats:
        parts = _parts(theta, x, y)
        share = parts / parts.sum(axis=0)
        return np.stack([share[0], share[1], share[2], -x * share[1], -y * share[2]], axis=1)

    ends = [
        least_squares(
            residuals,
            start,
            jac=jacobian,
            loss="huber",
            f_scale=HUBER_DELTA,
            xtol=1e-14,
            ftol=1e-14,
            gtol=1e-14,
            max_nfev=500,
            x_scale="jac",
        )
        for start in (starts if starts is not None else _starts(x, y, points.loss))
    ]
    found = min(ends, key=lambda end: float(end.cost))
    log_e, log_a, log_b, alpha, beta = (float(value) for value in found.x)
    surface = Surface(math.exp(log_e), math.exp(log_a + alpha * centre[0]), math.exp(log_b + beta * centre[1]), alpha, beta)
    return surface, float(found.cost), jacobian(found.x)


def _parts(theta: Floats, x: Floats, y: Floats) -> Floats:
    """[3, rows]: E, and what is missing of parameters, and of tokens."""
    log_e, log_a, log_b, alpha, beta = theta
    parts: Floats = np.exp(np.stack([np.full_like(x, log_e), log_a - alpha * x, log_b - beta * y]))
    return parts


def _starts(x: Floats, y: Floats, loss: Floats) -> list[Floats]:
    """The best exponents of a grid, each with the E, A, B >= 0 of least squares."""
    found: list[tuple[float, Floats]] = []
    for alpha in STARTING_EXPONENTS:
        for beta in STARTING_EXPONENTS:
            design = np.stack([np.ones_like(x), np.exp(-alpha * x), np.exp(-beta * y)], axis=1)
            solved, norm = nnls(design, loss)
            logs = np.log(np.maximum(solved, 1e-3 * loss.min()))  # a part that is not there still needs somewhere to begin
            found.append((float(norm), np.array([*logs, alpha, beta])))
    found.sort(key=lambda start: start[0])
    return [start for _, start in found[:NUM_POLISHED]]


def _centre(points: Points) -> tuple[float, float]:
    return float(np.log(points.n).mean()), float(np.log(points.tokens).mean())


def _centred(surface: Surface, points: Points) -> Floats:
    log_n, log_tokens = _centre(points)
    log_a, log_b = math.log(surface.A) - surface.alpha * log_n, math.log(surface.B) - surface.beta * log_tokens
    return np.array([math.log(surface.E), log_a, log_b, surface.alpha, surface.beta])


def _condition(jacobian: Floats) -> float:
    lengths = np.linalg.norm(jacobian, axis=0)
    return float(np.linalg.cond(jacobian / np.where(lengths > 0, lengths, 1.0)))


def _held_out(points: Points) -> HeldOut | None:
    """None where too few rows would be left."""
    order = np.argsort(points.flops, kind="stable")
    num_rows = max(1, round(HELD_OUT_SHARE * len(points)))
    rest, largest = points.take(order[:-num_rows]), points.take(order[-num_rows:])
    try:
        _check(rest)
    except DataError:
        return None
    surface, _, _ = _best(rest, starts=None)
    errors = np.abs(surface.losses(largest) / largest.loss - 1.0)
    return HeldOut(num_rows, float(errors.mean()), float(errors.max()))
