"""The loss surface L(N, D) = E + A / N^alpha + B / D^beta of Hoffmann et al. (arXiv 2203.15556, approach 3), fitted to finished runs. Pure.

The fit (`surface_descent`), bands from rows drawn with replacement, the condition, and what the largest budgets say of a fit to the
others. Points that do not determine five constants are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import DataError
from surefoot.plan.bands import band
from surefoot.plan.fits.surface_descent import centre_of, condition_of, descend, theta_of
from surefoot.plan.surface_record import Points as Points
from surefoot.plan.surface_record import Surface as Surface

Floats = NDArray[np.float64]

CONSTANTS = ("E", "A", "B", "alpha", "beta")
NUM_DRAWS = 200
LEAST_ROWS_FOR_BANDS = 2 * len(CONSTANTS)
"""Different runs. With fewer, rows drawn with replacement are nearly always the same ones, and the bands would look like certainty."""

HELD_OUT_SHARE = 0.1
"""Of the rows, those with the largest budgets, to see how far the surface carries beyond what it was fitted to."""

LEAST_SPREAD = 0.02
"""Standard deviation of log D at given log N. Below it every run has the same tokens per parameter, and either term explains all losses."""

LEAST_SHARE = 1e-5
"""Of the loss, what a term must reach somewhere for its exponent to mean anything: a hundredth of `surface_descent.HUBER_DELTA`."""


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
    surface, objective, jacobian = descend(points, starts=None)
    _refuse_missing_terms(jacobian)
    generator = np.random.default_rng(seed)
    at_optimum = [theta_of(surface, centre=centre_of(points))]
    num_draws = num_draws if _num_different(points) >= LEAST_ROWS_FOR_BANDS else 0
    draws = tuple(descend(_drawn(points, generator), starts=at_optimum, centre=centre_of(points))[0] for _ in range(num_draws))
    residuals: Floats = np.log(surface.losses(points)) - np.log(points.loss)
    return SurfaceFit(
        surface, objective, condition_of(jacobian), residuals, draws, _held_out(points, starts=at_optimum), float(points.flops.max())
    )


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


def _held_out(points: Points, *, starts: list[Floats]) -> HeldOut | None:
    """Whole budgets are held out. None where too few rows would be left."""
    wanted = max(1, round(HELD_OUT_SHARE * len(points)))
    limit = float(np.sort(points.flops)[-wanted]) * (1.0 - 1e-2)
    rest, largest = np.flatnonzero(points.flops < limit), np.flatnonzero(points.flops >= limit)
    if len(rest) < len(largest) or _problem(points.take(rest)):
        return None
    surface, _, _ = descend(points.take(rest), starts=starts, centre=centre_of(points))
    errors = np.abs(surface.losses(points) / points.loss - 1.0)
    beyond = errors[largest]
    return HeldOut(len(largest), float(points.flops[largest].min()), float(beyond.mean()), float(beyond.max()), float(errors[rest].mean()))


def summary_of(residuals: Sequence[float] | Floats) -> dict[str, float]:
    """Of relative errors: root mean square, median and largest."""
    size = np.abs(np.asarray(residuals))
    return {"rms": float(np.sqrt(np.mean(size**2))), "median": float(np.median(size)), "max": float(size.max())}
