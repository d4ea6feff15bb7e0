"""The best learning rate or batch of one sweep, between its grid points. Pure.

A sweep is a grid of runs of one model on one number of tokens. Near its best run the loss is taken for a parabola in the logarithm of what
was varied; where learning rate and batch were varied together, for a paraboloid in both, since the best rate moves with the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SAME_SWEEP = 0.02
"""Relative difference up to which sizes and tokens are one sweep's: whole numbers of steps of different batches are not equal."""

WINDOW = 4.0
"""Values up to this factor from the best are looked at: further out a loss rises faster above the best learning rate than below."""

STEEP = 0.05
"""Relative: runs that are so much worse than the best have left the parabola, or diverged."""

NUM_COEFFICIENTS = 6
"""Of a paraboloid in two variables."""


@dataclass(frozen=True, slots=True)
class Best:
    """Of one sweep: the value with the least loss, between grid points."""

    n: float
    tokens: float
    value: float
    loss: float


@dataclass(frozen=True, slots=True)
class LeftOutSweep:
    n: float
    tokens: float
    why: str


def best_of_sweeps(
    n: Floats, tokens: Floats, value: Floats, loss: Floats, *, also: Floats | None = None
) -> tuple[list[Best], list[LeftOutSweep]]:
    """The best value of each sweep that has one inside its grid. `also` is what was varied beside `value`."""
    found = [
        _minimum(float(np.median(n[rows])), float(np.median(tokens[rows])), value[rows], loss[rows], None if also is None else also[rows])
        for rows in sweeps_of(n, tokens)
    ]
    return [one for one in found if isinstance(one, Best)], [one for one in found if isinstance(one, LeftOutSweep)]


def sweeps_of(n: Floats, tokens: Floats) -> list[NDArray[np.intp]]:
    """Rows of one size and one number of tokens."""
    sweeps: list[list[int]] = []
    for row in range(len(n)):
        mine = (sweep for sweep in sweeps if _same(n[row], n[sweep[0]]) and _same(tokens[row], tokens[sweep[0]]))
        if (sweep := next(mine, None)) is None:
            sweeps.append([row])
        else:
            sweep.append(row)
    return [np.array(rows) for rows in sweeps]


def _same(one: float, other: float) -> bool:
    return abs(math.log(one / other)) <= math.log1p(SAME_SWEEP)


def _minimum(n: float, tokens: float, value: Floats, loss: Floats, also: Floats | None) -> Best | LeftOutSweep:
    best = value[np.argmin(loss)]
    if len(np.unique(value)) < 3:
        return LeftOutSweep(n, tokens, f"{len(np.unique(value))} values")
    if best in (value.min(), value.max()):
        return LeftOutSweep(n, tokens, f"the lowest loss is at the {'smallest' if best == value.min() else 'largest'} value, {best:.3g}")
    vertex = None if also is None else _of_paraboloid(value, also, loss)
    vertex = vertex or _of_parabola(value, loss)
    if vertex is None:
        return LeftOutSweep(n, tokens, "losses do not rise on both sides of the best value")
    return Best(n, tokens, *vertex)


def _of_parabola(value: Floats, loss: Floats) -> tuple[float, float] | None:
    """Over the lowest loss of each value: (value, loss) of the vertex."""
    tried = np.unique(value)
    lowest = np.array([loss[value == one].min() for one in tried])
    place = int(np.argmin(lowest))
    x = np.log(tried / tried[place])
    near = (np.abs(x) <= math.log(WINDOW) + 1e-6) & (lowest <= lowest[place] * (1.0 + STEEP))
    near[max(0, place - 1) : place + 2] = True
    curve, slope, level = (float(part) for part in np.polyfit(x[near], lowest[near], 2))
    if curve <= 0:
        return None
    at = -slope / (2.0 * curve)
    if not x[near].min() <= at <= x[near].max():
        return None
    return float(tried[place] * math.exp(at)), level + at * slope / 2.0


def _of_paraboloid(value: Floats, also: Floats, loss: Floats) -> tuple[float, float] | None:
    """None where the grid around the best run is too small for one, or its minimum is not inside."""
    best = int(np.argmin(loss))
    x, y = np.log(value / value[best]), np.log(also / also[best])
    near = (np.maximum(np.abs(x), np.abs(y)) <= math.log(WINDOW) + 1e-6) & (loss <= loss[best] * (1.0 + STEEP))
    x, y, z = x[near], y[near], loss[near]
    if len(z) < NUM_COEFFICIENTS + 2 or len(np.unique(x)) < 3 or len(np.unique(y)) < 3:
        return None
    solved, _, rank, _ = np.linalg.lstsq(np.stack([np.ones_like(x), x, y, x * x / 2.0, x * y, y * y / 2.0], axis=1), z, rcond=None)
    if rank < NUM_COEFFICIENTS:
        return None
    hessian = np.array([[solved[3], solved[4]], [solved[4], solved[5]]])
    if np.linalg.eigvalsh(hessian)[0] <= 0:
        return None
    at = -np.linalg.solve(hessian, solved[1:3])
    if not (x.min() <= at[0] <= x.max() and y.min() <= at[1] <= y.max()):
        return None
    return float(value[best] * math.exp(at[0])), float(solved[0] + at @ solved[1:3] / 2.0)
