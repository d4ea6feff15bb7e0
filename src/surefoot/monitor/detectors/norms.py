"""Rules of the global gradient norm before clipping: a level that stays up (tier 3), and single steps (tier 3b, burst)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.cusum import AT_ZERO, Cusum, Limits
from surefoot.monitor.detectors.robust import SIGMA_OF_MAD, Window, clipped, mad, median

NUM_KEPT = 256
NUM_LEAST, NUM_LEAST_LEVEL = 32, 64
LEVEL = Limits(slack=1.5, height=15.0)
FLOOR = 0.05
"""Sigma of the log norm at least: healthy runs have 0.06 to 0.11, and logs often print two digits."""

OUTLIER, BURST = 5.0, 100.0
"""Times the trailing median. Healthy runs reach 15 in single steps, and come to no harm; BLOOM's spike reached 4,000."""

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
        return {"value": self.value, "median": self.median, "times": self.value / self.median, "sigma_log": self.sigma, "z": self.z}


def read_norm(state: NormState, norm: float) -> NormReading | None:
    """None when there are too few norms before it, or it is not a positive number."""
    if len(state.logs) < NUM_LEAST or not (math.isfinite(norm) and norm > 0.0):
        return None
    level = median(state.logs.ordered)
    sigma = max(SIGMA_OF_MAD * mad(state.logs.ordered, centre=level), FLOOR)
    return NormReading(norm, math.exp(level), sigma, (math.log(norm) - level) / sigma)


def watch_norm(state: NormState, reading: NormReading, *, step: int, rules: Mapping[str, Asks]) -> tuple[NormState, list[Finding]]:
    findings = []
    times = reading.value / reading.median
    name = "grad_burst" if times > BURST and "grad_burst" in rules else "grad_outlier"
    if times > OUTLIER and name in rules:
        told = f"the gradient norm {reading.value:.3g} is {times:.3g} times its median of {reading.median:.3g}"
        findings.append(Finding(name, rules[name], told, step, reading.evidence()))
    if len(state.logs) < NUM_LEAST_LEVEL:
        return state, findings
    level, speaks = state.level.add(reading.z, step=step, limits=LEVEL)
    if speaks and "grad_level" in rules:
        told = f"the gradient norm has stayed above its median of {reading.median:.3g} since step {level.onset_step}"
        evidence = {**reading.evidence(), "cusum": level.total, "height": LEVEL.height}
        findings.append(Finding("grad_level", rules["grad_level"], told, level.onset_step, evidence))
    return replace(state, level=level), findings


def take_norm(state: NormState, norm: float, *, reading: NormReading | None) -> NormState:
    if not (math.isfinite(norm) and norm > 0.0):
        return state
    value = math.log(norm)
    if reading is not None:
        value = clipped(value, centre=math.log(reading.median), reach=CLIP_SIGMAS * reading.sigma)
    return replace(state, logs=state.logs.push(value))
