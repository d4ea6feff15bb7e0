"""Best sizes from runs of equal compute: the minimum of each budget's losses over log N, then power laws through the minima. Pure.

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
from surefoot.plan.bands import band
from surefoot.plan.fits.budget_curve import LEAST_SIZES, WINDOW, Budget, minima_of
from surefoot.plan.fits.budget_curve import LeftOut as LeftOut
from surefoot.plan.fits.budget_curve import Optimum as Optimum
from surefoot.plan.fits.line import fit_line

Floats = NDArray[np.float64]

SAME_BUDGET = 0.2
"""Relative difference up to which compute counts as one budget: whole numbers of steps, and FLOPs that are counted exactly, are not round.
What a loss owes to being off the middle of its budget is taken out of it."""

LEAST_LOG_STD = 1e-3
"""No minimum is known better than this: it keeps exact points from having no weight in common."""


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """y = coef * x^exponent; `draws` are of (log coef, exponent)."""

    coef: float
    exponent: float
    draws: tuple[tuple[float, float], ...] = ()

    def __call__(self, x: float) -> float:
        return float(self.coef * x**self.exponent)

    def values(self, x: float) -> tuple[float, ...]:
        """Of each draw."""
        return tuple(_power(log_coef + exponent * math.log(x)) for log_coef, exponent in self.draws)

    @property
    def coef_band(self) -> tuple[float, float]:
        return band(_power(log_coef) for log_coef, _ in self.draws)

    @property
    def exponent_band(self) -> tuple[float, float]:
        return band(exponent for _, exponent in self.draws)


@dataclass(frozen=True, slots=True)
class IsoFlopFit:
    """N* = coef * C^a, and D* and D*/N* likewise. Where D = C / 6 N their exponents are 1 - a and 1 - 2 a."""

    n_law: PowerLaw
    token_law: PowerLaw
    ratio_law: PowerLaw
    optima: tuple[Optimum, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def a(self) -> float:
        return self.n_law.exponent

    @property
    def largest_flops(self) -> float:
        """The last budget with a minimum: what is beyond it is extrapolated."""
        return max(optimum.flops for optimum in self.optima)


def fit_isoflop(
    n: Floats, flops: Floats, loss: Floats, *, tokens: Floats | None = None, window: float = WINDOW, seed: int = 0
) -> IsoFlopFit:
    """`tokens` are C / 6 N where they are not given. Raises DataError where fewer than two budgets have a minimum."""
    seen = flops / (6.0 * n) if tokens is None else tokens
    budgets = []
    for rows, middle, shifted in _at_their_middle(flops, loss):
        off = np.log(middle / flops[rows])
        budgets.append(Budget(middle, np.log(n[rows]), np.log(seen[rows]) + off, shifted))
    optima, left_out = minima_of(budgets, window=window)
    return fit_optima(optima, left_out, seed=seed)


def fit_optima(optima: Sequence[Optimum], left_out: Sequence[LeftOut] = (), *, seed: int = 0) -> IsoFlopFit:
    """The laws through minima that are known already."""
    n_law = law_through(optima, left_out, seed=seed)
    token_law = mirrored(n_law, *_line(optima, [optimum.tokens for optimum in optima]), times=1.0)
    ratio_law = mirrored(n_law, *_line(optima, [optimum.tokens / optimum.n for optimum in optima]), times=2.0)
    return IsoFlopFit(n_law, token_law, ratio_law, tuple(optima), tuple(left_out))


def law_through(optima: Sequence[Optimum], left_out: Sequence[LeftOut] = (), *, seed: int = 0) -> PowerLaw:
    """N* over C: least squares of logs, each optimum weighted by the inverse of its `log_n_std`."""
    if len(optima) < 2:
        reasons = "; ".join(f"{budget.flops:.3g}: {budget.why}" for budget in left_out)
        raise DataError(
            f"{len(optima)} budgets have a minimum, and a power law needs two" + (f" ({reasons})" if reasons else ""),
            where="fit isoflop",
            hint=f"add models on both sides of the best one, at least {LEAST_SIZES} for each budget",
        )
    design, std = _design(optima)
    line = fit_line(design, np.log([optimum.n for optimum in optima]), std=std, seed=seed)
    return PowerLaw(_power(line.coefficients[0]), float(line.coefficients[1]), tuple((float(c), float(e)) for c, e in line.draws))


def mirrored(n_law: PowerLaw, coef: float, exponent: float, *, times: float) -> PowerLaw:
    """A law of what falls by the power `times` of N* at equal compute: its errors are those of N*, turned round."""
    log_coef, centre = math.log(coef), math.log(n_law.coef)
    draws = tuple((log_coef - times * (drawn - centre), exponent - times * (power - n_law.exponent)) for drawn, power in n_law.draws)
    return PowerLaw(coef, exponent, draws)


def budgets_of(flops: Floats) -> list[NDArray[np.intp]]:
    """Rows of equal compute, the smallest budget first: rows are parted at the widest gaps until no budget is wider than `SAME_BUDGET`."""
    order = np.argsort(flops, kind="stable")
    logs = np.log(flops[order])
    found: list[NDArray[np.intp]] = []
    open_ranges = [(0, len(order))]
    while open_ranges:
        low, high = open_ranges.pop()
        if logs[high - 1] - logs[low] <= math.log1p(SAME_BUDGET):
            found.append(order[low:high])
            continue
        cut = low + 1 + int(np.argmax(np.diff(logs[low:high])))
        open_ranges += [(cut, high), (low, cut)]
    return found


def _at_their_middle(flops: Floats, loss: Floats) -> list[tuple[NDArray[np.intp], float, Floats]]:
    """For each budget its rows, its compute, and the losses as they would be there.

    At the best size the loss of a row moves with compute as the best loss does (the envelope theorem), so the slope between the lowest
    losses of neighbouring budgets serves for all rows of one.
    """
    groups = budgets_of(flops)
    middles = np.array([float(np.median(flops[rows])) for rows in groups])
    lowest = np.array([float(loss[rows].min()) for rows in groups])
    slopes = np.gradient(lowest, np.log(middles)) if len(groups) > 1 else np.zeros(1)
    shifts = [slope * np.log(middle / flops[rows]) for slope, middle, rows in zip(slopes, middles, groups, strict=True)]
    return [(rows, float(middle), loss[rows] + shift) for rows, middle, shift in zip(groups, middles, shifts, strict=True)]


def _line(optima: Sequence[Optimum], values: Sequence[float]) -> tuple[float, float]:
    design, std = _design(optima)
    log_coef, exponent = fit_line(design, np.log(values), std=std, num_draws=0).coefficients
    return _power(log_coef), float(exponent)


def _design(optima: Sequence[Optimum]) -> tuple[Floats, Floats]:
    log_flops = np.log([optimum.flops for optimum in optima])
    std = np.array([max(LEAST_LOG_STD, optimum.log_n_std) for optimum in optima])
    return np.stack([np.ones_like(log_flops), log_flops], axis=1), std


def _power(log_value: float) -> float:
    return math.exp(log_value) if log_value < 700.0 else math.inf
