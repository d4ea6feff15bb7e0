"""Laws of the best learning rate and batch size, from sweeps: lr = c N^p D^q, batch = c D^q. Pure.

Least squares of logs through the best values of all sweeps that have one inside their grid. The form is that of StepLaw (arXiv 2503.04715);
that the best batch follows tokens and not size is theirs too, and that of Zhang et al. for the critical batch (arXiv 2410.21676).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import DataError
from surefoot.plan.bands import band
from surefoot.plan.fits.line import fit_line
from surefoot.plan.fits.sweep_minimum import Best, LeftOutSweep, best_of_sweeps

Floats = NDArray[np.float64]

VARIABLES: Mapping[str, tuple[str, ...]] = {"lr": ("n", "tokens"), "batch": ("tokens", "n")}
"""What each may depend on, what it depends on first. A batch depends on the second only where the first does not vary."""

LEAST_SPREAD = 0.05
"""Standard deviation of a logarithm below which a variable counts as not varied, or as following from another."""


@dataclass(frozen=True, slots=True)
class TuningFit:
    """value = coef * product of (variable ^ exponent); `draws` are of (log coef, *exponents).

    `held_out` are factors: the law through the other sweeps, over the best value of the sweep that was left out.
    """

    coef: float
    exponents: dict[str, float]
    draws: tuple[tuple[float, ...], ...]
    sweeps: tuple[Best, ...]
    left_out: tuple[LeftOutSweep, ...]
    held_out: tuple[float, ...]

    def __call__(self, **variables: float) -> float:
        return float(self.coef * math.prod(variables[name] ** exponent for name, exponent in self.exponents.items()))

    def band_at(self, **variables: float) -> tuple[float, float]:
        logs = [1.0, *(math.log(variables[name]) for name in self.exponents)]
        return band(_power(math.fsum(part * log for part, log in zip(drawn, logs, strict=True))) for drawn in self.draws)

    @property
    def bands(self) -> dict[str, tuple[float, float]]:
        of_exponents = {name: band(drawn[index + 1] for drawn in self.draws) for index, name in enumerate(self.exponents)}
        return {"coef": band(_power(drawn[0]) for drawn in self.draws), **of_exponents}


def fit_tuning(n: Floats, tokens: Floats, value: Floats, loss: Floats, *, law: str, also: Floats | None = None, seed: int = 0) -> TuningFit:
    """`law` is "lr" or "batch". Raises DataError where too few sweeps have a best value, or nothing varies between them."""
    sweeps, left_out = best_of_sweeps(n, tokens, value, loss, also=also)
    logs = {"n": np.log([best.n for best in sweeps]), "tokens": np.log([best.tokens for best in sweeps])}
    variables = _variables(law, logs) if sweeps else ()
    if not variables or len(sweeps) < len(variables) + 2:
        raise _too_few(len(sweeps), left_out, variables or VARIABLES[law][:1])
    design = np.stack([np.ones(len(sweeps)), *(logs[name] for name in variables)], axis=1)
    target = np.log([best.value for best in sweeps])
    line = fit_line(design, target, seed=seed)
    exponents = {name: float(line.coefficients[index + 1]) for index, name in enumerate(variables)}
    draws = tuple(tuple(float(part) for part in drawn) for drawn in line.draws)
    held_out = _held_out(design, target, line.coefficients)
    return TuningFit(_power(line.coefficients[0]), exponents, draws, tuple(sweeps), tuple(left_out), held_out)


def _variables(law: str, logs: Mapping[str, Floats]) -> tuple[str, ...]:
    """Those of `VARIABLES` that vary, and not only with one another."""
    varied = [name for name in VARIABLES[law] if float(np.std(logs[name])) >= LEAST_SPREAD]
    if law == "batch" or len(varied) < 2:
        return tuple(varied[:1])
    x, y = logs[varied[0]], logs[varied[1]]
    rest = y - np.polyval(np.polyfit(x, y, 1), x)
    return tuple(varied) if float(np.std(rest)) >= LEAST_SPREAD else tuple(varied[:1])


def _held_out(design: Floats, target: Floats, coefficients: Floats) -> tuple[float, ...]:
    """Each sweep by a law through the others: its residual over 1 - leverage (Allen 1974, PRESS)."""
    leverage = np.einsum("ij,jk,ik->i", design, np.linalg.pinv(design.T @ design), design)
    logs = (design @ coefficients - target) / np.maximum(1e-9, 1.0 - leverage)
    return tuple(_power(float(log)) for log in logs)


def _too_few(num_sweeps: int, left_out: Sequence[LeftOutSweep], variables: Sequence[str]) -> DataError:
    reasons = "; ".join(f"N {sweep.n:.3g}, D {sweep.tokens:.3g}: {sweep.why}" for sweep in left_out[:5])
    return DataError(
        f"{num_sweeps} sweeps have their best value inside their grid, and a law of {' and '.join(variables)} needs "
        f"{len(variables) + 2} that differ in each" + (f" ({reasons})" if reasons else ""),
        where="fit",
        hint="add sweeps of other sizes and tokens, and widen those whose best value is the smallest or the largest tried",
    )


def _power(log_value: float) -> float:
    return math.exp(log_value) if log_value < 700.0 else math.inf
