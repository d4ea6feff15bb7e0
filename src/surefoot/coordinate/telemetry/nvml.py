"""Accelerators from the driver's library (NVML) through nvidia-ml-py, where both are there.

Every call is asked by name and may be refused by itself: what this driver, this accelerator or this container does not tell is unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from surefoot.coordinate.telemetry.records import GpuSample
from surefoot.coordinate.telemetry.words import is_blank, total

_MAX_NVLINKS = 18
_NVLINK_ERRORS = (
    "NVML_NVLINK_ERROR_DL_REPLAY",
    "NVML_NVLINK_ERROR_DL_RECOVERY",
    "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "NVML_NVLINK_ERROR_DL_CRC_DATA",
)
_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


class NvmlAbsent(Exception):
    """There is no library, no driver, or nothing that it could be asked for; the message says which."""


def load_nvml(name: str = "pynvml") -> Any:
    """The module, begun; the caller calls its nvmlShutdown. Raises NvmlAbsent."""
    try:
        nvml = importlib.import_module(name)
    except ImportError:
        raise NvmlAbsent("nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlAbsent(f"NVML: {error}") from None
    return nvml


def read_gpus(nvml: Any) -> tuple[GpuSample, ...]:
    """All that this process may see. Raises NvmlAbsent when they cannot even be counted."""
    try:
        number = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise NvmlAbsent(f"NVML cannot count accelerators: {error}") from None
    handles = (_ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(number))
    return tuple(_gpu(nvml, handle, index) for index, handle in enumerate(handles) if handle is not None)


def _gpu(nvml: Any, handle: Any, index: int) -> GpuSample:
    def ask(name: str, *arguments: Any) -> Any:
        return _ask(nvml, name, handle, *arguments)

    def constant(name: str) -> Any:
        return getattr(nvml, name, None)

    memory, use = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    rows = ask("nvmlDeviceGetRemappedRows")
    pci = ask("nvmlDeviceGetPciInfo")
    sm, memory_clock = constant("NVML_CLOCK_SM"), constant("NVML_CLOCK_MEM")
    links = _links(ask)
    bad, good = constant("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"), constant("NVML_MEMORY_ERROR_TYPE_CORRECTED")
    volatile, aggregate = constant("NVML_VOLATILE_ECC"), constant("NVML_AGGREGATE_ECC")
    return GpuSample(
        id=_text(getattr(pci, "busId", None)).lower() or str(index),
        name=_text(ask("nvmlDeviceGetName")),
        uuid=_text(ask("nvmlDeviceGetUUID")),
        utilization_percent=_float(getattr(use, "gpu", None)),
        memory_used_bytes=_int(getattr(memory, "used", None)),
        memory_total_bytes=_int(getattr(memory, "total", None)),
        sm_clock_mhz=_float(ask("nvmlDeviceGetClockInfo", sm)),
        max_sm_clock_mhz=_float(ask("nvmlDeviceGetMaxClockInfo", sm)),
        memory_clock_mhz=_float(ask("nvmlDeviceGetClockInfo", memory_clock)),
        power_w=_milli(ask("nvmlDeviceGetPowerUsage")),
        power_limit_w=_milli(ask("nvmlDeviceGetEnforcedPowerLimit")),
        temperature_c=_float(ask("nvmlDeviceGetTemperature", constant("NVML_TEMPERATURE_GPU"))),
        slow_temperature_c=_float(ask("nvmlDeviceGetTemperatureThreshold", constant("NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"))),
        slowed_by=_reasons(ask("nvmlDeviceGetCurrentClocksEventReasons"), ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        ecc_is_on=None if (mode := ask("nvmlDeviceGetEccMode")) is None else bool(mode[0]),
        ecc_volatile_corrected=_int(ask("nvmlDeviceGetTotalEccErrors", good, volatile)),
        ecc_volatile_uncorrected=_int(ask("nvmlDeviceGetTotalEccErrors", bad, volatile)),
        ecc_aggregate_corrected=_int(ask("nvmlDeviceGetTotalEccErrors", good, aggregate)),
        ecc_aggregate_uncorrected=_int(ask("nvmlDeviceGetTotalEccErrors", bad, aggregate)),
        remapped_rows_corrected=None if rows is None else _int(rows[0]),
        remapped_rows_uncorrected=None if rows is None else _int(rows[1]),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        pcie_replays=_int(ask("nvmlDeviceGetPcieReplayCounter")),
        pcie_generation=_int(ask("nvmlDeviceGetCurrPcieLinkGeneration")),
        pcie_width=_int(ask("nvmlDeviceGetCurrPcieLinkWidth")),
        max_pcie_width=_int(ask("nvmlDeviceGetMaxPcieLinkWidth")),
        nvlinks=len(links) or None,
        nvlinks_up=sum(links.values()) if links else None,
        nvlink_errors=total(
            _int(ask("nvmlDeviceGetNvLinkErrorCounter", link, constant(name)))
            for link, is_up in links.items()
            if is_up
            for name in _NVLINK_ERRORS
        ),
    )


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """None where the library has no such call or refuses this one."""
    call: Callable[..., Any] | None = getattr(nvml, name, None)
    if call is None or any(argument is None for argument in arguments):
        return None
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _links(ask: Callable[..., Any]) -> dict[int, bool]:
    """Whether each link that there is carries data."""
    states: Iterable[tuple[int, Any]] = ((link, ask("nvmlDeviceGetNvLinkState", link)) for link in range(_MAX_NVLINKS))
    return {link: bool(state) for link, state in states if state is not None}


def _reasons(*masks: Any) -> tuple[str, ...] | None:
    mask = next((_int(value) for value in masks if value is not None), None)
    return None if mask is None else tuple(sorted(name for bit, name in _REASONS.items() if mask & bit))


def _int(value: Any) -> int | None:
    """Whole and not negative; what stands for "there is none" is none."""
    return int(value) if isinstance(value, int) and value >= 0 and not is_blank(value) else None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not is_blank(value) else None


def _milli(value: Any) -> float | None:
    known = _float(value)
    return None if known is None else known / 1e3


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value) if value is not None else ""
