"""How far hardware is from its data sheet: the few numbers of the throughput model, by default and fitted to measured runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import PlanInfeasible
from surefoot.plan.layouts.links import LinkRates


@dataclass(frozen=True, slots=True)
class Calibration:
    """Shares of the data sheet in (0, 1], but for `latency`, a factor on NCCL's own figure for a step between nodes.

    `products`: of the peak, in large matrix products. `attention`: of what products reach, in a fused attention, whose
    causal half alone is counted. `memory`: of the memory's bandwidth, in everything between them; small matrices are
    slow because this part is large beside them. `link`: of a link's bandwidth. `hidden_tensor`, `hidden_data`: share of the collectives
    inside layers, and of gathering weights and reducing gradients, that runs behind compute. `error` is the mean relative error on the
    `num_rows` it was fitted to, runs of `program`.
    """

    products: float
    attention: float
    memory: float
    link: float
    latency: float
    hidden_tensor: float
    hidden_data: float
    rails: float
    error: float
    num_rows: int = 0
    source: str = "measured"
    program: str = "surefoot"

    @property
    def is_measured(self) -> bool:
        """On the user's own runs."""
        return self.num_rows > 0

    @property
    def rates(self) -> LinkRates:
        return LinkRates(self.link, self.latency, self.rails)

    @property
    def stamp(self) -> str:
        """What a plan says about it."""
        if self.is_measured:
            return f"calibrated on {self.num_rows} measured runs: {self.error:.0%} mean error on them"
        return f"not calibrated: MFU +- {self.error:.0%} of itself ({self.source})"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "calibrated": self.is_measured}


PUBLISHED = "fitted to public H100 runs of llm-foundry, Megatron-LM and nanotron, each source counting as much"

DEFAULT = Calibration(
    products=0.732,
    attention=0.223,
    memory=0.525,
    link=0.836,
    latency=3.03,
    hidden_tensor=0.92,
    hidden_data=0.744,
    rails=0.50,
    error=0.19,
    source=PUBLISHED,
)
"""What `fit_default` finds in the published tables, rounded; tests/reference does it again. `error` is what it finds of a source from
the two others: 21% of llm-foundry, 20% of Megatron-LM, 15% of nanotron."""

BEFORE_ANY_RUN = replace(
    DEFAULT, products=0.7, attention=0.5, memory=0.6, link=0.7, latency=2.0, hidden_tensor=0.5, hidden_data=0.5, rails=0.75
)
"""Where `fit_default` starts: round numbers. Seven tenths of a peak, half of that in attention (FlashAttention-2, arXiv 2407.08608)."""


class _Scale(NamedTuple):
    """`spread` is how far a cluster is from the default, as a standard deviation: of the logarithm, or of the log-odds of a share."""

    name: str
    is_share: bool
    spread: float


_SCALES = (
    _Scale("products", True, 0.5),
    _Scale("attention", True, 1.0),
    _Scale("memory", True, 0.5),
    _Scale("link", True, 1.0),
    _Scale("latency", False, 0.7),
    _Scale("hidden_tensor", True, 1.5),
    _Scale("hidden_data", True, 1.5),
)

NOISE = 0.06
"""Two runs of one layout differ by so much, and the model by more: a residual counts in these, and its square root beyond (soft L1)."""

TABLE_WEIGHT = 9.0
"""A published table counts as so many runs, the length of the shortest, however many rows it has: they are on one cluster."""

Predict = Callable[[Calibration], Sequence[float]]


def fit(
    measured_s: Sequence[float], predict: Predict, *, start: Calibration = DEFAULT, free: Sequence[str] = (), weights: Sequence[float] = ()
) -> Calibration:
    """The calibration under which `predict`, the step time of each row, is nearest to `measured_s`: robust least squares on logarithms.

    Few rows cannot decide on six numbers, so each is held at `start` as by a measurement of its own; what the rows do not tell stays there.
    `free` names further numbers that are fitted, `rails`; `weights` count rows more or less than once. Raises PlanInfeasible without rows.
    """
    if not measured_s:
        raise PlanInfeasible("no measured runs to calibrate on", where="measured", hint="a table with at least one row")
    from scipy.optimize import least_squares  # half a second to import: a plan without a fit answers at once

    scales = [*_SCALES, *(_Scale(name, True, 1.0) for name in free)]
    scale_of_rows = np.sqrt(np.asarray(weights or [1.0] * len(measured_s)))
    logs = np.log(np.asarray(measured_s, dtype=np.float64))

    def residuals(steps: NDArray[np.float64]) -> NDArray[np.float64]:
        predicted = np.log(np.asarray(predict(_moved(start, scales, steps)), dtype=np.float64))
        return np.concatenate([(predicted - logs) * scale_of_rows / NOISE, steps])

    found = least_squares(residuals, np.zeros(len(scales)), loss="soft_l1")
    best = _moved(start, scales, found.x)
    errors = [abs(predicted / measured - 1.0) for predicted, measured in zip(predict(best), measured_s, strict=True)]
    return replace(best, error=float(np.mean(errors)), num_rows=len(measured_s), source="measured")


def fit_default(sources: Sequence[tuple[Sequence[float], Predict]]) -> Calibration:
    """`DEFAULT` from tables of runs, each with its step times and what predicts them; each table counts as much as any other."""
    measured = [value for table, _ in sources for value in table]
    weights = [TABLE_WEIGHT / len(table) for table, _ in sources for _ in table]

    def predict(calibration: Calibration) -> list[float]:
        return [value for _, one in sources for value in one(calibration)]

    return fit(measured, predict, start=BEFORE_ANY_RUN, free=("rails",), weights=weights)


def _moved(start: Calibration, scales: Sequence[_Scale], steps: NDArray[np.float64]) -> Calibration:
    moved = {}
    for scale, step in zip(scales, steps, strict=True):
        value, by = getattr(start, scale.name), float(step) * scale.spread
        moved[scale.name] = 1.0 / (1.0 + (1.0 - value) / value * math.exp(-by)) if scale.is_share else value * math.exp(by)
    return replace(start, **moved)
