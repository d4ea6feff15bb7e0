"""The loss surface L(N, D) = E + A / N^alpha + B / D^beta of Hoffmann et al. (arXiv 2203.15556, approach 3), fitted to finished runs. Pure.

The objective is theirs: the *sum* of Huber losses, delta 1e-3, of the error of log L. It has a long curved valley, in which one descent
with the usual tolerances stops far from the bottom, as the published constants did (Besiroglu et al., arXiv 2404.10102). So there are many
starts, each of them good: for given exponents the best E, A, B of plain least squares are a linear problem (variable projection). N and D
are measured from their geometric means, which takes the condition of the problem from 1e11 to about 30.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import DataError
from surefoot.plan.bands import band
from surefoot.plan.law_records import Points as Points
from surefoot.plan.law_records import Surface as Surface

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

CONSTANTS = ("E", "A", "B", "alpha", "beta")
NUM_DRAWS = 200
LEAST_ROWS_FOR_BANDS = 2 * len(CONSTANTS)
"""Different runs. With fewer, rows drawn with replacement are nearly always the same ones, and the bands would look like certainty."""

HELD_OUT_SHARE = 0.1
"""Of the rows, those with the largest budgets, to see how far the surface carries beyond what it was fitted to."""

LEAST_SPREAD = 0.02
"""Standard deviation of log D at given log N. Below it every run has the same tokens per parameter, and either term explains all losses."""

LEAST_SHARE = 1e-5
"""Of the loss, what a term must reach somewhere for its exponent to mean anything: a hundredth of `HUBER_DELTA`."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Relative errors of the loss at the `num_rows` runs of `from_flops` and more, of a surface fitted to the rest; `of_rest` is its mean
    error there."""

    num_rows: int
    from_flops: float
    mean: float
    max: float
    of_rest: float


@dataclass(frozen=True, slots=True)
class SurfaceFit:
    """`draws` are fits to rows drawn with replacement, none where there are too few; `condition` is of the Jacobian at the optimum, its
    columns of length 1.

    `residuals` are log L of the surface less log L of the run, in the order of the points.
    """

    surface: Surface
    objective: float
    condition: float
    residuals: Floats
    draws: tuple[Surface, ...]
    held_out: HeldOut | None
    largest_flops: float

    @property
    def bands(self) -> dict[str, tuple[float, float]]:
        names = (*CONSTANTS, "a")
        return {name: band(getattr(drawn, name) for drawn in self.draws) for name in names} if self.draws else {}


def fit_surface(points: Points, *, num_draws: int = NUM_DRAWS, seed: int = 0) -> SurfaceFit:
    """Raises DataError where the points do not determine five constants."""
    if problem := _problem(points):
        raise DataError(
            problem, where="fit parametric", hint="add runs: at least three sizes and three numbers of tokens, ten rows or more in all"
        )
    surface, objective, jacobian = _best(points, starts=None)
    _refuse_missing_terms(jacobian)
    generator = np.random.default_rng(seed)
    at_optimum = [_theta(surface, centre=_centre(points))]
    num_draws = num_draws if _num_different(points) >= LEAST_ROWS_FOR_BANDS else 0
    draws = tuple(_best(_drawn(points, generator), starts=at_optimum, centre=_centre(points))[0] for _ in range(num_draws))
    residuals: Floats = np.log(surface.losses(points)) - np.log(points.loss)
    return SurfaceFit(surface, objective, _condition(jacobian), residuals, draws, _held_out(points), float(points.flops.max()))


def huber_sum(surface: Surface, points: Points) -> float:
    """The objective, as it is compared between fits."""
    error = np.abs(np.log(surface.losses(points)) - np.log(points.loss))
    parts = np.where(error <= HUBER_DELTA, error * error / 2.0, HUBER_DELTA * (error - HUBER_DELTA / 2.0))
    return float(parts.sum())


def without_highest(points: Points, count: int) -> NDArray[np.intp]:
    """Rows in their order, less the `count` highest losses: of early or broken runs, which no power law describes."""
    return np.sort(np.argsort(points.loss, kind="stable")[: len(points) - count])


def _problem(points: Points) -> str:
    """Why `points` determine no surface; empty where they may."""
    sizes, tokens = len(np.unique(points.n)), len(np.unique(points.tokens))
    if _num_different(points) <= len(CONSTANTS):
        return f"{_num_different(points)} different runs do not determine {len(CONSTANTS)} constants"
    if sizes < 3 or tokens < 3:
        return f"{sizes} sizes and {tokens} numbers of tokens do not determine two exponents"
    x, y = np.log(points.n), np.log(points.tokens)
    if float(np.std(y - np.polyval(np.polyfit(x, y, 1), x))) < LEAST_SPREAD:
        ratio = float(np.median(points.tokens / points.n))
        return f"tokens follow from parameters (about {ratio:.3g} each), so one exponent cannot be told from the other"
    if float(np.ptp(points.loss)) < LEAST_SHARE * float(points.loss.max()):
        return f"all losses are {points.loss[0]:g}"
    return ""


def _num_different(points: Points) -> int:
    """Runs that differ in size or tokens: a repeat says how much losses scatter, and nothing about the surface."""
    return int(np.unique(np.stack([points.n, points.tokens]), axis=1).shape[1])


def _refuse_missing_terms(jacobian: Floats) -> None:
    """A column of the Jacobian holds the share that a term has in each loss."""
    for column, name in ((1, "parameters"), (2, "tokens")):
        if float(np.abs(jacobian[:, column]).max()) < LEAST_SHARE:
            raise DataError(
                f"losses do not fall with {name}, so the exponent of {name} is not determined",
                where="fit parametric",
                hint=f"are all of these runs finished, and does the table mix {name} with something else?",
            )


def _drawn(points: Points, generator: np.random.Generator) -> Points:
    """As many rows with replacement; drawn again where they would determine nothing, as happens with few rows."""
    for _ in range(100):
        drawn = points.take(generator.integers(0, len(points), len(points)))
        if not _problem(drawn):
            return drawn
    return points


def _best(points: Points, *, starts: list[Floats] | None, centre: tuple[float, float] | None = None) -> tuple[Surface, float, Floats]:
    """The lowest end of all descents: surface, objective, and the Jacobian of log loss there.

    Parameters are log E, log A and log B at the centre, log alpha, log beta: none can become negative.
    """
    from scipy.optimize import least_squares

    middle = centre or _centre(points)
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


def _centre(points: Points) -> tuple[float, float]:
    return float(np.log(points.n).mean()), float(np.log(points.tokens).mean())


def _surface(theta: Floats, *, centre: tuple[float, float]) -> Surface:
    log_e, log_a, log_b = (float(value) for value in theta[:3])
    alpha, beta = (float(value) for value in np.exp(theta[3:]))
    return Surface(math.exp(log_e), _power(log_a + alpha * centre[0]), _power(log_b + beta * centre[1]), alpha, beta)


def _theta(surface: Surface, *, centre: tuple[float, float]) -> Floats:
    log_a, log_b = math.log(surface.A) - surface.alpha * centre[0], math.log(surface.B) - surface.beta * centre[1]
    return np.array([math.log(surface.E), log_a, log_b, math.log(surface.alpha), math.log(surface.beta)])


def _power(log_value: float) -> float:
    return math.exp(min(log_value, 700.0))


def _condition(jacobian: Floats) -> float:
    lengths = np.linalg.norm(jacobian, axis=0)
    return float(np.linalg.cond(jacobian / np.where(lengths > 0, lengths, 1.0)))


def _held_out(points: Points) -> HeldOut | None:
    """Whole budgets are held out. None where too few rows would be left."""
    wanted = max(1, round(HELD_OUT_SHARE * len(points)))
    limit = float(np.sort(points.flops)[-wanted]) * (1.0 - 1e-2)
    rest, largest = np.flatnonzero(points.flops < limit), np.flatnonzero(points.flops >= limit)
    if len(rest) < len(largest) or _problem(points.take(rest)):
        return None
    surface, _, _ = _best(points.take(rest), starts=None)
    errors = np.abs(surface.losses(points) / points.loss - 1.0)
    beyond = errors[largest]
    return HeldOut(len(largest), float(points.flops[largest].min()), float(beyond.mean()), float(beyond.max()), float(errors[rest].mean()))


def summary_of(residuals: Sequence[float] | Floats) -> dict[str, float]:
    """Of relative errors: root mean square, median and largest."""
    size = np.abs(np.asarray(residuals))
    return {"rms": float(np.sqrt(np.mean(size**2))), "median": float(np.median(size)), "max": float(size.max())}
