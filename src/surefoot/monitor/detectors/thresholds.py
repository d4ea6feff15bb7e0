"""Where the rules speak: the settings of `[monitor]`, which `surefoot calibrate` suggests values for."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.core.sections import MonitorSection


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Sigmas, heights of cumulative sums, and factors; what each is worth stands at its setting."""

    outlier_sigmas: float
    mild_sigmas: float
    joint_sigmas: float
    sustained_height: float
    sustained_slow_height: float
    grad_level_height: float
    grad_outlier_factor: float
    grad_burst_factor: float
    classic_max_norm: float
    classic_sigmas: float


def thresholds_of(monitor: MonitorSection) -> Thresholds:
    return Thresholds(**{name: float(getattr(monitor, name)) for name in Thresholds.__dataclass_fields__})


DEFAULT = thresholds_of(MonitorSection())
