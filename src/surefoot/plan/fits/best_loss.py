"""The least loss that compute buys, L* = E + k / C^exponent, through the minima of an isoFLOP sweep. Pure.

What L(N, D) = E + A/N^alpha + B/D^beta comes to along its best sizes, with exponent alpha beta / (alpha + beta) (Hoffmann et al., arXiv
2203.15556).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.plan.fits.line import NUM_DRAWS

Floats = NDArray[np.float64]

EXPONENTS = np.linspace(0.01, 0.6, 119)
"""What alpha beta / (alpha + beta) may be: 0.18 for the published surfaces."""

LEAST_BUDGETS = 4
"""One more than there are constants."""


@dataclass(frozen=True, slots=True)
class LossLaw:
    """`draws` are of (E, k, exponent)."""

    E: float
    k: float
    exponent: float
    draws: tuple[tuple[float, float, float], ...] = ()

    def __call__(self, flops: float) -> float:
        return _loss(self.E, self.k, self.exponent, flops)

    def values(self, flops: float) -> tuple[float, ...]:
        """Of each draw."""
        return tuple(_loss(*drawn, flops) for drawn in self.draws)


def fit_best_loss(flops: Sequence[float], loss: Sequence[float], *, seed: int = 0) -> LossLaw | None:
    """None with fewer than `LEAST_BUDGETS` budgets, or where the loss does not fall. Draws: losses anew from the scatter around the law."""
    if len(flops) < LEAST_BUDGETS:
        return None
    x, y = np.log(np.asarray(flops)), np.asarray(loss)
    ((floor, k, exponent),) = _solve(x, y[None])
    if k <= 0:
        return None
    fitted = floor + k * np.exp(-exponent * x)
    dof = len(y) - 3
    generator = np.random.default_rng(seed)
    scatter = math.sqrt(float(np.sum((y - fitted) ** 2)) / dof) * np.sqrt(dof / generator.chisquare(dof, (NUM_DRAWS, 1)))
    draws = _solve(x, fitted + scatter * generator.standard_normal((NUM_DRAWS, len(y))))
    return LossLaw(float(floor), float(k), float(exponent), tuple((float(e), float(c), float(p)) for e, c, p in draws))


def _solve(x: Floats, losses: Floats) -> Floats:
    """[rows, 3]: for each row of losses the best exponent of the grid, with E and k >= 0 of least squares."""
    centre = float(x.mean())
    best = np.full(len(losses), np.inf)
    found = np.zeros((len(losses), 3))
    mean = losses.mean(axis=1)
    for exponent in EXPONENTS:
        term = np.exp(-exponent * (x - centre))
        off = term - term.mean()
        k = np.maximum(0.0, losses @ off / float(off @ off))
        floor = mean - k * term.mean()
        k = np.where(floor < 0, losses @ term / float(term @ term), k)
        floor = np.maximum(0.0, floor)
        error = np.sum((losses - floor[:, None] - k[:, None] * term) ** 2, axis=1)
        better = error < best
        best = np.where(better, error, best)
        found[better] = np.stack([floor, k * math.exp(exponent * centre), np.full_like(k, exponent)], axis=1)[better]
    return found


def _loss(floor: float, k: float, exponent: float, flops: float) -> float:
    return float(floor + k * flops**-exponent)
