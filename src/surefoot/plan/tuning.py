"""Best learning rates and batch sizes from sweeps, and power laws through them: lr = c N^p D^q, batch tokens = c D^q. Pure.

A sweep is a grid of runs of one model on one number of tokens. Its best value is the vertex of a parabola of loss over the logarithm,
taken over the least loss of everything else that was varied; at an edge of the grid there is no vertex, and the cell is left out by name.
Laws are least squares of logs, bands from cells drawn with replacement.
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

NUM_DRAWS = 500


@dataclass(frozen=True, slots=True)
class Best:
    """Of one cell: the value with the least loss, between grid points."""

    n: float
    tokens: float
    value: float
    loss: float


@dataclass(frozen=True, slots=True)
class TuningFit:
    """value = coef * product of (variable ^ exponent); `bands` are 95%, of `coef` and of each exponent."""

    coef: float
    exponents: dict[str, float]
    bands: dict[str, tuple[float, float]]
    cells: tuple[Best, ...]
    num_left_out: int

    def __call__(self, **variables: float) -> float:
        return float(self.coef * math.prod(variables[name] ** exponent for name, exponent in self.exponents.items()))


def fit_tuning(n: Floats, tokens: Floats, value: Floats, loss: Floats, *, variables: Sequence[str], seed: int = 0) -> TuningFit:
    """`variables` of "n" and "tokens". Raises DataError where too few cells have a best value, or none varies enough."""
    cells, num_left_out = best_of_cells(n, tokens, value, loss)
    logs = {"n": np.log([cell.n for cell in cells]), "tokens": np.log([cell.tokens for cell in cells])} if cells else {}
    least = len(variables) + 2
    if len(cells) < least or any(len(np.unique(np.round(logs[name], 6))) < 2 for name in variables):
        raise DataError(
            f"{len(cells)} sweeps have their best value inside their grid ({num_left_out} at its edge), a law of {', '.join(variables)} "
            f"needs {least} that differ in each",
            where="fit",
            hint="add sweeps, or widen those whose best value is the smallest or the largest tried",
        )
    design = np.stack([np.ones(len(cells)), *(logs[name] for name in variables)], axis=1)
    target = np.log([cell.value for cell in cells])
    solved = _solve(design, target)
    generator = np.random.default_rng(seed)
    draws = [_solve(design[rows], target[rows]) for rows in (generator.integers(0, len(cells), len(cells)) for _ in range(NUM_DRAWS))]
    bands = {"coef": band([math.exp(min(700.0, drawn[0])) for drawn in draws])}
    bands |= {name: band([float(drawn[index + 1]) for drawn in draws]) for index, name in enumerate(variables)}
    exponents = {name: float(solved[index + 1]) for index, name in enumerate(variables)}
    return TuningFit(math.exp(solved[0]), exponents, bands, tuple(cells), num_left_out)


def best_of_cells(n: Floats, tokens: Floats, value: Floats, loss: Floats) -> tuple[list[Best], int]:
    """And how many cells have none inside their grid."""
    rows: dict[tuple[float, float], list[int]] = {}
    for index in range(len(n)):
        rows.setdefault((float(n[index]), float(tokens[index])), []).append(index)
    found = [_vertex(key, value[cell], loss[cell]) for key, cell in rows.items()]
    cells = [best for best in found if best is not None]
    return cells, len(found) - len(cells)


def _vertex(key: tuple[float, float], value: Floats, loss: Floats) -> Best | None:
    lowest = {float(one): float(loss[value == one].min()) for one in np.unique(value)}
    tried = sorted(lowest)
    place = min(range(len(tried)), key=lambda index: lowest[tried[index]])
    if place in (0, len(tried) - 1):
        return None
    near = tried[place - 1 : place + 2]
    curve, slope, level = np.polyfit(np.log(near) - math.log(near[1]), [lowest[one] for one in near], 2)
    if curve <= 0:
        return None
    shift = -slope / (2.0 * curve)
    return Best(*key, near[1] * math.exp(shift), float(level + shift * slope / 2.0))


def _solve(design: Floats, target: Floats) -> Floats:
    solved, *_ = np.linalg.lstsq(design, target, rcond=None)
    return np.asarray(solved)
