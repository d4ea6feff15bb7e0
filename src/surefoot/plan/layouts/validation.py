"""How good the throughput model is on a table of measured runs: calibrated on a few of them, asked about the others. Pure but for numpy."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from surefoot.plan.layouts.calibration import DEFAULT, Calibration, fit
from surefoot.plan.layouts.measured import MeasuredRun

NUM_CALIBRATION = 6


class Prediction(NamedTuple):
    name: str
    measured_mfu: float
    predicted_mfu: float

    @property
    def error(self) -> float:
        """Of the predicted speed, over the measured one."""
        return self.predicted_mfu / self.measured_mfu - 1.0


@dataclass(frozen=True, slots=True)
class Validation:
    """`mape`: mean absolute relative error of predicted speeds, of rows that were not calibrated on. `constant_mape`: that of one MFU for
    all of them, the median of the rows that were. `kendall_tau`: how well they are ranked, from -1 to 1; None where all are measured alike.
    """

    calibrated_on: tuple[str, ...]
    held_out: tuple[Prediction, ...]
    mape: float
    constant_mape: float
    kendall_tau: float | None

    def as_dict(self) -> dict[str, object]:
        return {
            "calibrated_on": list(self.calibrated_on),
            "mape": self.mape,
            "constant_mape": self.constant_mape,
            "kendall_tau": self.kendall_tau,
            "held_out": [{"name": one.name, "mfu": one.measured_mfu, "predicted": one.predicted_mfu} for one in self.held_out],
        }


def calibrate(runs: Sequence[MeasuredRun], *, start: Calibration = DEFAULT) -> Calibration:
    """On all of them. The program is that of most."""

    def predict(calibration: Calibration) -> list[float]:
        return [run.predict(calibration).total_s for run in runs]

    found = fit([run.step_s for run in runs], predict, start=start)
    ((program, _),) = Counter(run.implementation.name for run in runs).most_common(1)
    return replace(found, program=program)


def validate(
    runs: Sequence[MeasuredRun],
    *,
    chosen: Sequence[int] | None = None,
    start: Calibration = DEFAULT,
    num_calibration: int = NUM_CALIBRATION,
) -> Validation | None:
    """Calibrated on the rows `chosen`, by default `spread_out`. None where too few are left to ask about."""
    chosen = spread_out(runs, number=num_calibration) if chosen is None else chosen
    rest = [run for index, run in enumerate(runs) if index not in set(chosen)]
    if len(rest) < 2:
        return None
    known = [runs[index] for index in chosen]
    calibration = calibrate(known, start=start)
    held_out = tuple(Prediction(run.name, run.mfu(run.step_s), run.mfu(run.predict(calibration).total_s)) for run in rest)
    constant = statistics.median(run.mfu(run.step_s) for run in known)
    return Validation(
        calibrated_on=tuple(run.name for run in known),
        held_out=held_out,
        mape=statistics.fmean(abs(one.error) for one in held_out),
        constant_mape=statistics.fmean(abs(constant / one.measured_mfu - 1.0) for one in held_out),
        kendall_tau=kendall_tau([one.measured_mfu for one in held_out], [one.predicted_mfu for one in held_out]),
    )


def spread_out(runs: Sequence[MeasuredRun], *, number: int = NUM_CALIBRATION) -> tuple[int, ...]:
    """Rows that are far from each other in model and layout, whatever was measured: the middle one, then always the farthest from those."""
    told = np.array([[math.log(value) for value in _traits(run)] for run in runs])
    told = (told - told.mean(axis=0)) / np.maximum(told.std(axis=0), 1e-9)
    chosen = [int(np.argmin((told**2).sum(axis=1)))]
    while len(chosen) < min(number, len(runs)):
        distances = ((told[:, None] - told[None, chosen]) ** 2).sum(axis=2).min(axis=1)
        chosen.append(int(np.argmax(distances)))
    return tuple(chosen)


def _traits(run: MeasuredRun) -> tuple[float, ...]:
    layout, tokens = run.layout, run.workload.tokens_per_step / run.layout.num_devices
    return run.workload.sizes.num_parameters, layout.num_devices, tokens, layout.tp, layout.pp, layout.data_ranks, run.workload.seq_len


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Tau-b: pairs in the same order less pairs in the other, over pairs that differ. None where all of one are equal."""
    agree = differ_first = differ_second = 0
    for index in range(len(first)):
        for other in range(index):
            one, two = np.sign(first[index] - first[other]), np.sign(second[index] - second[other])
            agree += int(one * two)
            differ_first += one != 0
            differ_second += two != 0
    return agree / math.sqrt(differ_first * differ_second) if differ_first and differ_second else None
