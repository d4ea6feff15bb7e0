"""What measured runs say of the planner: each beside what was predicted of it; how well those are foretold that were not fitted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from surefoot.plan.layouts.calibration import Calibration
from surefoot.plan.layouts.measured import MeasuredRun
from surefoot.plan.layouts.validation import Validation, calibrate, validate
from surefoot.plan.memory.estimate import Memory, estimate, fits


@dataclass(frozen=True, slots=True)
class RowReport:
    """`memory` is of the first stage, where rank 0 is, whose peak tables tell; `worst` of the fullest device, which must fit."""

    run: MeasuredRun
    predicted_mfu: float
    memory: Memory
    worst: Memory

    @property
    def memory_error(self) -> float | None:
        """Relative, of what the allocator reserves."""
        return self.memory.reserved / self.run.memory_bytes - 1.0 if self.run.memory_bytes else None

    def as_dict(self) -> dict[str, Any]:
        measured = self.run.mfu(self.run.step_s)
        return {
            "name": self.run.name,
            "program": self.run.implementation.name,
            "mfu": measured,
            "predicted_mfu": self.predicted_mfu,
            "step_s": self.run.step_s,
            "predicted_step_s": self.run.step_s * measured / self.predicted_mfu,
            "memory_bytes": self.run.memory_bytes,
            "predicted_memory_bytes": self.memory.reserved,
            "predicted_worst_bytes": self.worst.total,
            "fits": fits(self.worst, self.run.hardware.memory_bytes),
        }


@dataclass(frozen=True, slots=True)
class MeasuredReport:
    """`calibration` is fitted to all rows, `validation` to a few of them and asked about the others; None where there are too few."""

    calibration: Calibration
    rows: tuple[RowReport, ...]
    validation: Validation | None

    @property
    def memory_error(self) -> float | None:
        """Mean absolute relative error, over rows that tell a peak."""
        errors = [abs(row.memory_error) for row in self.rows if row.memory_error is not None]
        return fmean(errors) if errors else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_rows": len(self.rows),
            "memory_error": self.memory_error,
            "validation": self.validation.as_dict() if self.validation else None,
            "rows": [row.as_dict() for row in self.rows],
        }

    @property
    def told(self) -> str:
        """In a sentence, for the page."""
        parts = [self.calibration.stamp]
        if (found := self.validation) is not None:
            tau = f", rank correlation {found.kendall_tau:.2f}" if found.kendall_tau is not None else ""
            parts.append(
                f"fitted to {len(found.calibrated_on)} rows only, the other {len(found.held_out)} are foretold to {found.mape:.1%}{tau}; "
                f"one MFU for all of them is {found.constant_mape:.1%} off"
            )
        if self.memory_error is not None:
            parts.append(f"measured peaks of memory are foretold to {self.memory_error:.1%}")
        return "; ".join(parts)


def report(runs: Sequence[MeasuredRun]) -> MeasuredReport:
    calibration = calibrate(runs)
    return MeasuredReport(calibration, tuple(_row(run, calibration) for run in runs), validate(runs))


def _row(run: MeasuredRun, calibration: Calibration) -> RowReport:
    return RowReport(
        run=run,
        predicted_mfu=run.mfu(run.predict(calibration).total_s),
        memory=estimate(run.workload, run.layout, stage=0, implementation=run.implementation),
        worst=estimate(run.workload, run.layout, implementation=run.implementation),
    )
