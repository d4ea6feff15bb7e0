"""The bottom of the objective of Hoffmann et al. (arXiv 2203.15556): the *sum* of Huber losses, delta 1e-3, of the error of log L. Pure.

It lies in a long curved valley, in which one descent with the usual tolerances stops far from the bottom, as the published constants did
(Besiroglu et al., arXiv 2404.10102). So there are many starts, each of them good: for given exponents the best E, A, B of plain least
squares are a linear problem (variable projection). N and D are measured from their geometric means, which takes the condition of the
problem from 1e11 to about 30.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from surefoot.plan.surface_record import Points, Surface

Floats = NDArray[np.float64]

HUBER_DELTA = 1e-3
"""Of the error of log loss; Hoffmann et al. chose it, and all later fits of these points kept it."""

STARTING_EXPONENTS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.75)
"""For each of both. What is published lies between 0.28 and 0.54."""

NUM_POLISHED = 6
"""Starts that are followed to the bottom: the best by variable projection."""

TOLERANCE = 1e-14
"""Of every stopping rule: the valley is so flat that the usual 1e-8 ends half way down."""

MOST_EVALUATIONS = 500
"""Of a descent; half of them need 15 to 50, the longest that was seen 299."""


def descend(points: Points, *, starts: list[Floats] | None, centre: tuple[float, float] | None = None) -> tuple[Surface, float, Floats]:
    """The lowest end of all descents: surface, objective, and the Jacobian of log loss there.

    Parameters are log E, log A and log B at the centre, log alpha, log beta: none can become negative.
    """
    from scipy.optimize import least_squares

    middle = centre or centre_of(points)
    x, y, log_loss = np.log(points.n) - middle[0], np.log(points.tokens) - middle[1], np.log(points.loss)

    def residuals(theta: Floats) -> Floats:
        error: Floats = np.log(_parts(theta, x, y).sum(axis=0)) - log_loss
        return error

    def jacobian(theta: Floats) -> Floats:
        parts = _parts(theta, x, y)
        share = parts / parts.sum(axis=0)
        alpha, beta = np.exp(theta[3:])
        return np.stack([share[0], share[1], share[2], -alpha * x * share[1], -beta * y * share[2]], axis=1)

    limits = {"xtol": TOLERANCE, "ftol": TOLERANCE, "gtol": TOLERANCE, "max_nfev": MOST_EVALUATIONS}
    with np.errstate(over="ignore", invalid="ignore"):  # a step too far is infinite, and taken back
        ends = [
            least_squares(residuals, start, jac=jacobian, loss="huber", f_scale=HUBER_DELTA, x_scale="jac", **limits)
            for start in (starts if starts is not None else _starts(x, y, points.loss))
        ]
    found = min(ends, key=lambda end: float(end.cost))
    return _surface(found.x, centre=middle), float(found.cost), jacobian(found.x)


def _parts(theta: Floats, x: Floats, y: Floats) -> Floats:
    """[3, rows]: E, and what is missing of parameters, and of tokens."""
    log_e, log_a, log_b = theta[:3]
    alpha, beta = np.exp(theta[3:])
    parts: Floats = np.exp(np.stack([np.full_like(x, log_e), log_a - alpha * x, log_b - beta * y]))
    return parts


def _starts(x: Floats, y: Floats, loss: Floats) -> list[Floats]:
    """The best exponents of a grid, each with the E, A, B >= 0 of least squares."""
    from scipy.optimize import nnls

    found: list[tuple[float, Floats]] = []
    for alpha in STARTING_EXPONENTS:
        for beta in STARTING_EXPONENTS:
            design = np.stack([np.ones_like(x), np.exp(-alpha * x), np.exp(-beta * y)], axis=1)
            solved, norm = nnls(design, loss)
            logs = np.log(np.maximum(solved, 1e-3 * loss.min()))  # a part that is not there still needs somewhere to begin
            found.append((float(norm), np.array([*logs, math.log(alpha), math.log(beta)])))
    found.sort(key=lambda start: start[0])
    return [start for _, start in found[:NUM_POLISHED]]


def centre_of(points: Points) -> tuple[float, float]:
    return float(np.log(points.n).mean()), float(np.log(points.tokens).mean())


def _surface(theta: Floats, *, centre: tuple[float, float]) -> Surface:
    log_e, log_a, log_b = (float(value) for value in theta[:3])
    alpha, beta = (float(value) for value in np.exp(theta[3:]))
    return Surface(math.exp(log_e), _power(log_a + alpha * centre[0]), _power(log_b + beta * centre[1]), alpha, beta)


def theta_of(surface: Surface, *, centre: tuple[float, float]) -> Floats:
    log_a, log_b = math.log(surface.A) - surface.alpha * centre[0], math.log(surface.B) - surface.beta * centre[1]
    return np.array([math.log(surface.E), log_a, log_b, math.log(surface.alpha), math.log(surface.beta)])


def _power(log_value: float) -> float:
    return math.exp(min(log_value, 700.0))


def condition_of(jacobian: Floats) -> float:
    lengths = np.linalg.norm(jacobian, axis=0)
    return float(np.linalg.cond(jacobian / np.where(lengths > 0, lengths, 1.0)))
