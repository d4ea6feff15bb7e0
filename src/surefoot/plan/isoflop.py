"""Best sizes from runs of equal compute: a parabola through each budget's losses over log N, then power laws through their minima. Pure.

Approach 2 of Hoffmann et al. (arXiv 2203.15556). Where a budget's lowest loss is at its smallest or largest model there is no minimum to be
seen, and that budget is left out by name: a vertex outside of what was measured is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import DataError
from surefoot.plan.surface import band

Floats = NDArray[np.float64]

WINDOW = 4.0
"""Models up to this factor from the best one are looked at. Losses over log N are not symmetric further out, and a wide parabola leans."""

LEAST_POINTS = 4
"""One more than a parabola has coefficients: without it nothing would be known about its error."""

SAME_BUDGET = 0.02
"""Relative difference up to which compute counts as equal: 6 N D of whole numbers of steps is not round."""

NUM_DRAWS = 500
LEAST_LOG_STD = 1e-3


@dataclass(frozen=True, slots=True)
class Optimum:
    """Of one budget. `log_n_std`: standard error of log N* from the scatter around the parabola."""

    flops: float
    n: float
    loss: float
    log_n_std: float
    num_points: int

    @property
    def tokens(self) -> float:
        """From C = 6 N D."""
        return self.flops / (6.0 * self.n)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A budget without a minimum."""

    flops: float
    why: str


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """y = coef * x^exponent; `bands` are 95% of both."""

    coef: float
    exponent: float
    coef_band: tuple[float, float]
    exponent_band: tuple[float, float]

    def __call__(self, x: float) -> float:
        return float(self.coef * x**self.exponent)


@dataclass(frozen=True, slots=True)
class IsoFlopFit:
    """N* = coef * C^a. D* = C / 6 N*, so its exponent is 1 - a, and that of D*/N* is 1 - 2 a."""

    n_law: PowerLaw
    optima: tuple[Optimum, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def a(self) -> float:
        return self.n_law.exponent


def fit_isoflop(n: Floats, flops: Floats, loss: Floats, *, window: float = WINDOW, seed: int = 0) -> IsoFlopFit:
    """Raises DataError where fewer than two budgets have a minimum."""
    optima: list[Optimum] = []
    left_out: list[LeftOut] = []
    for rows in budgets_of(flops):
        found = _minimum(n[rows], loss[rows], flops=float(np.median(flops[rows])), window=window)
        (optima if isinstance(found, Optimum) else left_out).append(found)  # type: ignore[arg-type]
    return IsoFlopFit(law_through(optima, left_out, seed=seed), tuple(optima), tuple(left_out))


def law_through(optima: Sequence[Optimum], left_out: Sequence[LeftOut] = (), *, seed: int = 0) -> PowerLaw:
    """Least squares of logs, each weighted by the inverse of its standard error. The band: optima drawn anew from their errors."""
    if len(optima) < 2:
        reasons = "; ".join(f"{budget.flops:.3g}: {budget.why}" for budget in left_out)
        raise DataError(
            f"{len(optima)} budgets have a minimum, and a power law needs two" + (f" ({reasons})" if reasons else ""),
            where="fit isoflop",
            hint=f"add models on both sides of the best one, at least {LEAST_POINTS} for each budget",
        )
    x = np.log([optimum.flops for optimum in optima])
    y = np.log([optimum.n for optimum in optima])
    std = np.array([max(LEAST_LOG_STD, optimum.log_n_std) for optimum in optima])
    exponent, log_coef = np.polyfit(x, y, 1, w=1.0 / std)
    generator = np.random.default_rng(seed)
    # Scatter beyond the errors of single minima is real too: budgets differ in what else was tuned.
    excess = math.sqrt(max(1.0, float(np.sum(((y - log_coef - exponent * x) / std) ** 2)) / max(1, len(optima) - 2)))
    draws = [np.polyfit(x, log_coef + exponent * x + generator.normal(0.0, excess * std), 1, w=1.0 / std) for _ in range(NUM_DRAWS)]
    return PowerLaw(
        coef=math.exp(log_coef),
        exponent=float(exponent),
        coef_band=band([math.exp(drawn[1]) for drawn in draws]),
        exponent_band=band([float(drawn[0]) for drawn in draws]),
    )


def budgets_of(flops: Floats) -> list[NDArray[np.intp]]:
    """Rows of equal compute, the smallest budget first."""
    order = np.argsort(flops, kind="stable")
    groups: list[list[int]] = []
    for row in order:
        if groups and flops[row] <= flops[groups[-1][0]] * (1.0 + SAME_BUDGET):
            groups[-1].append(int(row))
        else:
            groups.append([int(row)])
    return [np.array(group) for group in groups]


def _minimum(n: Floats, loss: Floats, *, flops: float, window: float) -> Optimum | LeftOut:
    best = int(np.argmin(loss))
    near = (n >= n[best] / window) & (n <= n[best] * window)
    x, y = np.log(n[near]), loss[near]
    if len(np.unique(x)) < LEAST_POINTS:
        return LeftOut(flops, f"{len(np.unique(x))} sizes within a factor {window:g} of the best")
    if n[best] in (n.min(), n.max()):
        return LeftOut(flops, f"the lowest loss is at the {'smallest' if n[best] == n.min() else 'largest'} size, {n[best]:.3g}")
    centre = float(x.mean())
    (curve, slope, _), covariance = _parabola(x - centre, y)
    if curve <= 0:
        return LeftOut(flops, "losses do not rise on both sides of the best size")
    vertex = -slope / (2.0 * curve)
    if not x.min() - centre <= vertex <= x.max() - centre:
        return LeftOut(flops, "the parabola has its minimum outside of what was measured")
    by_curve, by_slope = slope / (2.0 * curve**2), -1.0 / (2.0 * curve)
    gradient = np.array([by_curve, by_slope, 0.0])
    std = math.sqrt(max(0.0, float(gradient @ covariance @ gradient)))
    lowest = float(np.polyval(np.polyfit(x - centre, y, 2), vertex))
    return Optimum(flops, math.exp(centre + vertex), lowest, std, int(near.sum()))


def _parabola(x: Floats, y: Floats) -> tuple[tuple[float, float, float], Floats]:
    """Coefficients, highest first, and their covariance."""
    design = np.stack([x * x, x, np.ones_like(x)], axis=1)
    solved, *_ = np.linalg.lstsq(design, y, rcond=None)
    residual = y - design @ solved
    variance = float(residual @ residual) / max(1, len(x) - 3)
    covariance: Floats = variance * np.linalg.pinv(design.T @ design)
    return (float(solved[0]), float(solved[1]), float(solved[2])), covariance
