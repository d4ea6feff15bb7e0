"""Accelerators out of the text that a DCGM exporter serves (the Prometheus exposition format). Pure.

The numbers with which DCGM says that it has none (the top of each integer type, 2^47 and above as floats) are no values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.coordinate.telemetry.records import GpuSample
from surefoot.coordinate.telemetry.words import is_blank, total

_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'(?P<name>[A-Za-z_]\w*)\s*=\s*"(?P<value>(?:[^"\\]|\\.)*)"')
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str | bytes) -> tuple[Metric, ...]:
    """Every line that is one; comments, broken lines, blanks and what is not finite are left out."""
    words = text.decode(errors="replace") if isinstance(text, bytes) else text
    found = (_metric(line) for line in words.splitlines() if not line.startswith("#"))
    return tuple(metric for metric in found if metric is not None)


def parse_dcgm(text: str | bytes) -> tuple[GpuSample, ...]:
    """One sample per accelerator that a metric names, in the order of their numbers. Parts of one (MIG) are not taken for the whole."""
    by_gpu: dict[str, dict[str, float]] = {}
    labels: dict[str, Mapping[str, str]] = {}
    for metric in parse_metrics(text):
        gpu = metric.labels.get("gpu")
        if gpu is None or not metric.name.startswith("DCGM_FI_") or metric.labels.get("GPU_I_ID"):
            continue
        by_gpu.setdefault(gpu, {})[metric.name.removeprefix("DCGM_FI_")] = metric.value
        labels[gpu] = metric.labels
    order = sorted(by_gpu, key=lambda gpu: (not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0, gpu))
    return tuple(_gpu(gpu, by_gpu[gpu], labels=labels[gpu]) for gpu in order)


def _gpu(gpu: str, values: Mapping[str, float], *, labels: Mapping[str, str]) -> GpuSample:
    used, free, reserved = (values.get(f"DEV_FB_{name}") for name in ("USED", "FREE", "RESERVED"))
    total_mib = values.get("DEV_FB_TOTAL", used + free + (reserved or 0.0) if used is not None and free is not None else None)
    xid = _count(values, "DEV_XID_ERRORS")
    return GpuSample(
        id=(labels.get("pci_bus_id") or gpu).lower(),
        name=labels.get("modelName", ""),
        uuid=labels.get("UUID", ""),
        utilization_percent=values.get("DEV_GPU_UTIL"),
        memory_used_bytes=None if used is None else int(used * _MIB),
        memory_total_bytes=None if total_mib is None else int(total_mib * _MIB),
        sm_clock_mhz=values.get("DEV_SM_CLOCK"),
        memory_clock_mhz=values.get("DEV_MEM_CLOCK"),
        power_w=values.get("DEV_POWER_USAGE"),
        temperature_c=values.get("DEV_GPU_TEMP"),
        memory_temperature_c=values.get("DEV_MEMORY_TEMP"),
        ecc_volatile_corrected=_count(values, "DEV_ECC_SBE_VOL_TOTAL"),
        ecc_volatile_uncorrected=_count(values, "DEV_ECC_DBE_VOL_TOTAL"),
        ecc_aggregate_corrected=_count(values, "DEV_ECC_SBE_AGG_TOTAL"),
        ecc_aggregate_uncorrected=_count(values, "DEV_ECC_DBE_AGG_TOTAL"),
        remapped_rows_corrected=_count(values, "DEV_CORRECTABLE_REMAPPED_ROWS"),
        remapped_rows_uncorrected=_count(values, "DEV_UNCORRECTABLE_REMAPPED_ROWS"),
        remap_failed=None if (failed := values.get("DEV_ROW_REMAP_FAILURE")) is None else failed > 0,
        pcie_replays=_count(values, "DEV_PCIE_REPLAY_COUNTER"),
        nvlink_errors=total(
            _count(values, f"DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL") for kind in ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")
        ),
        last_xid=xid or None,
    )


def _count(values: Mapping[str, float], name: str) -> int | None:
    value = values.get(name)
    return None if value is None or value < 0 or value != int(value) else int(value)


def _metric(line: str) -> Metric | None:
    match = _LINE.match(line)
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    if not math.isfinite(value) or is_blank(value):
        return None
    return Metric(match["name"], {label["name"]: _unescaped(label["value"]) for label in _LABEL.finditer(match["labels"] or "")}, value)


def _unescaped(text: str) -> str:
    return text.replace(r"\n", "\n").replace(r"\"", '"').replace(r"\\", "\\")
