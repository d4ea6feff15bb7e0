"""Where the losses of one budget are least: a parabola over log N with a little lean, shared noise, robust against single bad runs. Pure.

On a surface E + A/N^alpha + B/D^beta the third derivative along a budget is (beta - alpha) times the second at the minimum, so a pure
parabola is off to one side by an amount that depends on how far out it looks. The cubic term takes that up; it is held near zero as far
as the noise demands, so few or noisy runs still get their parabola.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.plan.fits.line import PRIOR_DOF

Floats = NDArray[np.float64]

WINDOW = 4.0
"""Models up to this factor from the best one are looked at: further out no low power of log N describes a loss."""

WIDEST_WINDOW = 16.0
"""Where sizes are so far apart that too few are in the window, the nearest ones up to here are taken."""

LEAST_SIZES = 4
"""One more than a parabola has coefficients: without it nothing would be known about its error."""

HUBER_TUNING = 1.345
"""In standard deviations: 95% as good as least squares where errors are normal (Huber 1964; Holland and Welsch 1977)."""

NUM_REWEIGHTINGS = 20


@dataclass(frozen=True, slots=True)
class Budget:
    """Runs of `flops` each, in any order; sizes may repeat."""

    flops: float
    log_n: Floats
    log_tokens: Floats
    loss: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """Of one budget. `log_n_std`: standard error of log N*; `num_points`: runs it rests on."""

    flops: float
    n: float
    tokens: float
    loss: float
    log_n_std: float
    num_points: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A budget without a minimum."""

    flops: float
    why: str


@dataclass(frozen=True, slots=True)
class _Curve:
    """`x` is log N from the best run; `curvature` that of the plain parabola, `noise` its residuals in units of it."""

    budget: Budget
    centre: float
    x: Floats
    log_tokens: Floats
    loss: Floats
    curvature: float
    noise: Floats


def minima_of(budgets: Sequence[Budget], *, window: float = WINDOW) -> tuple[list[Optimum], list[LeftOut]]:
    """The minimum of each budget that has one, and why the others have none."""
    looked_at = [_curve(budget, window=window) for budget in budgets]
    curves = [curve for curve in looked_at if isinstance(curve, _Curve)]
    noise = _shared_noise(curves)
    found = [_minimum(curve, noise=noise, lean=3.0 / math.log(window)) if isinstance(curve, _Curve) else curve for curve in looked_at]
    return [one for one in found if isinstance(one, Optimum)], [one for one in found if isinstance(one, LeftOut)]


def _curve(budget: Budget, *, window: float) -> _Curve | LeftOut:
    sizes, best = np.unique(budget.log_n), float(budget.log_n[np.argmin(budget.loss)])
    distance = np.abs(sizes - best)
    if len(sizes) >= LEAST_SIZES and best in (sizes[0], sizes[-1]):
        return LeftOut(
            budget.flops, f"the lowest loss is at the {'smallest' if best == sizes[0] else 'largest'} size, {math.exp(best):.3g}"
        )
    reach = max(math.log(window), min(math.log(WIDEST_WINDOW), _nearest(distance, LEAST_SIZES))) + 1e-6
    num_sizes = int((distance <= reach).sum())
    if num_sizes < LEAST_SIZES:
        return LeftOut(budget.flops, f"{num_sizes} sizes within a factor {math.exp(reach):.3g} of the best")
    near = np.abs(budget.log_n - best) <= reach
    x, loss = budget.log_n[near] - best, budget.loss[near]
    solved = np.polyfit(x, loss, 2)
    if solved[0] <= 0:
        return LeftOut(budget.flops, "losses do not rise on both sides of the best size")
    curvature = 2.0 * float(solved[0])
    noise = (loss - np.polyval(solved, x)) * math.sqrt(len(x) / max(1, len(x) - 3)) / curvature
    return _Curve(budget, best, x, budget.log_tokens[near], loss, curvature, noise)


def _nearest(distance: Floats, count: int) -> float:
    return float(np.sort(distance)[count - 1]) if len(distance) >= count else math.inf


def _shared_noise(curves: Sequence[_Curve]) -> float:
    """Standard deviation in units of the curvature, by the median: a bad run among good ones does not move it.

    In these units budgets are alike: the scatter of losses, from uneven tuning or an uneven ladder of sizes, shrinks with what there is
    to lose.
    """
    return float(np.median(np.abs(np.concatenate([curve.noise for curve in curves])))) / 0.6745 if curves else 0.0


def _minimum(curve: _Curve, *, noise: float, lean: float) -> Optimum | LeftOut:
    """`lean`: standard deviation of third derivative over second; at it the cubic is as large as the parabola at the window's edge."""
    x, loss = curve.x, curve.loss
    design = np.stack([np.ones_like(x), x, x * x / 2.0, x**3 / 6.0], axis=1)
    sigma = noise * curve.curvature
    penalty = np.array([0.0, 0.0, 0.0, noise / lean])
    weights = np.ones_like(x)
    for _ in range(NUM_REWEIGHTINGS):
        rows = np.vstack([design * np.sqrt(weights)[:, None], penalty])
        solved, *_ = np.linalg.lstsq(rows, np.append(loss * np.sqrt(weights), 0.0), rcond=None)
        residual = loss - design @ solved
        weights = np.minimum(1.0, HUBER_TUNING * sigma / np.maximum(np.abs(residual), 1e-12)) if sigma > 1e-12 else weights
    at = _vertex(solved, low=float(x.min()), high=float(x.max()))
    if at is None:
        return LeftOut(curve.budget.flops, "the fitted curve has no minimum inside of what was measured")
    slope_of_vertex = np.array([0.0, 1.0, at, at * at / 2.0]) / (solved[2] + solved[3] * at)
    variance = (float(np.sum(weights * residual**2)) + PRIOR_DOF * sigma**2) / (len(x) - 3 + PRIOR_DOF)
    log_n_std = math.sqrt(max(0.0, variance * float(slope_of_vertex @ np.linalg.pinv(rows.T @ rows) @ slope_of_vertex)))
    log_tokens = float(np.polyval(np.polyfit(x, curve.log_tokens, 1), at))
    level = float(solved @ [1.0, at, at * at / 2.0, at**3 / 6.0])
    return Optimum(
        flops=curve.budget.flops,
        n=math.exp(curve.centre + at),
        tokens=math.exp(log_tokens),
        loss=level,
        log_n_std=log_n_std,
        num_points=len(x),
    )


def _vertex(solved: Floats, *, low: float, high: float) -> float | None:
    """Where slope + curve x + cubic x^2 / 2 is 0 and rising: the root that stays when the cubic goes to 0."""
    _, slope, curve, cubic = (float(value) for value in solved)
    inside = curve * curve - 2.0 * cubic * slope
    if curve <= 0 or inside <= 0:
        return None
    at = -2.0 * slope / (curve + math.sqrt(inside))
    return at if low < at < high else None
