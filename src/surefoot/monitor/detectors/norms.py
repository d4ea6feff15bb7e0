"""Rules of the global gradient norm before clipping: a level that stays up (tier 3), and single steps (tier 3b, burst)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.cusum import AT_ZERO, Cusum, Limits
from surefoot.monitor.detectors.robust import SIGMA_OF_MAD, Window, clipped, mad, median
from surefoot.monitor.detectors.thresholds import Thresholds

NUM_KEPT = 256
NUM_LEAST, NUM_LEAST_SIGMA, NUM_LEAST_LEVEL = 4, 32, 64
"""Values before factors, sigmas and levels are judged: a median of four tells a burst, it takes more to tell noise."""

SLACK = 1.5
FLOOR = 0.05
"""Sigma of the log norm at least: healthy runs have 0.06 to 0.11, and logs often print two digits."""

CLIP_SIGMAS = 6.0
_EMPTY = Window(NUM_KEPT)


@dataclass(frozen=True, slots=True)
class NormState:
    """`logs`: natural logarithms of the newest norms, outliers cut."""

    logs: Window = _EMPTY
    level: Cusum = AT_ZERO


@dataclass(frozen=True, slots=True)
class NormReading:
    value: float
    median: float
    sigma: float
    z: float

    def evidence(self) -> dict[str, object]:
        return {"value": self.value, "median": self.median, "times": self.value / self.median, "z": self.z}


def read_norm(state: NormState, norm: float) -> NormReading | None:
    """None when there are too few norms before it, or it is not a positive number."""
    if len(state.logs) < NUM_LEAST or not (math.isfinite(norm) and norm > 0.0):
        return None
    level = median(state.logs.ordered)
    is_known = len(state.logs) >= NUM_LEAST_SIGMA
    sigma = max(SIGMA_OF_MAD * mad(state.logs.ordered, centre=level), FLOOR) if is_known else math.inf
    return NormReading(norm, math.exp(level), sigma, (math.log(norm) - level) / sigma)


def watch_norm(
    state: NormState, reading: NormReading, *, step: int, rules: Mapping[str, Asks], thresholds: Thresholds
) -> tuple[NormState, list[Finding]]:
    findings = []
    times = reading.value / reading.median
    name = "grad_burst" if times > thresholds.grad_burst_factor and "grad_burst" in rules else "grad_outlier"
    if times > thresholds.grad_outlier_factor and name in rules:
        told = f"the gradient norm {reading.value:.3g} is {times:.3g} times its median of {reading.median:.3g}"
        findings.append(Finding(name, rules[name], told, step, reading.evidence()))
    if len(state.logs) < NUM_LEAST_LEVEL:
        return state, findings
    level, speaks = state.level.add(reading.z, step=step, limits=Limits(SLACK, thresholds.grad_level_height))
    if speaks and "grad_level" in rules:
        told = f"the gradient norm has stayed above its median of {reading.median:.3g} since step {level.onset_step}"
        evidence = {**reading.evidence(), "cusum": level.total, "height": thresholds.grad_level_height}
        findings.append(Finding("grad_level", rules["grad_level"], told, level.onset_step, evidence))
    return replace(state, level=level), findings


def take_norm(state: NormState, norm: float, *, reading: NormReading | None) -> NormState:
    if not (math.isfinite(norm) and norm > 0.0):
        return state
    value = math.log(norm)
    if reading is not None and math.isfinite(reading.sigma):
        value = clipped(value, centre=math.log(reading.median), reach=CLIP_SIGMAS * reading.sigma)
    return replace(state, logs=state.logs.push(value))
