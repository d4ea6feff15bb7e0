"""The rules that a node's telemetry is held to, each with its limit and where that comes from. Data only.

`growth`: how much a counter may grow within the window. `above` and `below`: a level that may not be held for the window. `drop`: a value
may not stay under the highest that this node showed, as that of a link which lost lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

_HOUR_S: Final = 3600.0
_MINUTE_S: Final = 60.0
_HARD_SLOW: Final = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"}


@dataclass(frozen=True, slots=True)
class Rule:
    """`read` takes the record of a part and returns its value, None where nobody said. `source` is why the limit is what it is."""

    name: str
    of: Literal["gpu", "port", "disk", "host", "node"]
    title: str
    read: Callable[[Any], float | None]
    kind: Literal["growth", "above", "below", "drop"]
    limit: float
    window_s: float
    advice: Literal["watch", "reset", "drain"]
    source: str


def _field(name: str) -> Callable[[Any], float | None]:
    def read(part: Any) -> float | None:
        value = getattr(part, name)
        return None if value is None else float(value)

    return read


def _counter(name: str) -> Callable[[Any], float | None]:
    def read(port: Any) -> float | None:
        value = port.counters.get(name)
        return None if value is None else float(value)

    return read


def _share(part: str, whole: str) -> Callable[[Any], float | None]:
    def read(record: Any) -> float | None:
        known, total = getattr(record, part), getattr(record, whole)
        return None if known is None or not total else known / total

    return read


def _is_slowed(gpu: Any) -> float | None:
    return None if gpu.slowed_by is None else float(bool(_HARD_SLOW.intersection(gpu.slowed_by)))


def _needs_recovery(gpu: Any) -> float | None:
    return None if gpu.recovery_action is None else float(gpu.recovery_action.lower() != "none")


def _is_up(port: Any) -> float | None:
    return None if port.state is None else float(port.state == "ACTIVE" and port.interface_state != "down")


def _num_gpus(sample: Any) -> float | None:
    return float(len(sample.gpus)) if "gpu" not in sample.unread else None


def _is_unsynchronized(host: Any) -> float | None:
    return None if host.clock_is_synchronized is None else float(not host.clock_is_synchronized)


_OWN = "our choice: "
_DCGM = "the health watch of DCGM"
_MEMORY = "NVIDIA, GPU memory error management"

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "gpu_lost", "node", "accelerators that can be seen", _num_gpus, "drop", 0, 0, "drain", _OWN + "one that is gone does not come back"
    ),
    Rule("gpu_ecc_bad", "gpu", "uncorrected memory errors", _field("ecc_volatile_uncorrected"), "growth", 0, _HOUR_S, "reset", _MEMORY),
    Rule(
        "gpu_ecc_good",
        "gpu",
        "corrected memory errors",
        _field("ecc_volatile_corrected"),
        "growth",
        1000,
        _HOUR_S,
        "watch",
        _OWN + "single ones are harmless; a thousand within an hour precede uncorrected ones",
    ),
    Rule("gpu_rows", "gpu", "rows remapped after errors", _field("remapped_rows_uncorrected"), "growth", 0, _HOUR_S, "reset", _MEMORY),
    Rule("gpu_remap_pending", "gpu", "a row waits for a reset to be remapped", _field("remap_pending"), "above", 0, 0, "reset", _MEMORY),
    Rule("gpu_remap_failed", "gpu", "a row could not be remapped", _field("remap_failed"), "above", 0, 0, "drain", _MEMORY),
    Rule("gpu_recovery", "gpu", "the driver asks for a recovery", _needs_recovery, "above", 0, 0, "drain", "Xid 154 of the driver"),
    Rule("gpu_pcie", "gpu", "PCIe replays", _field("pcie_replays"), "growth", 8, _MINUTE_S, "watch", _DCGM),
    Rule("gpu_pcie_width", "gpu", "PCIe lanes", _field("pcie_width"), "drop", 0, _MINUTE_S, "drain", _OWN + "lanes do not come back"),
    Rule("gpu_nvlink", "gpu", "NVLink errors", _field("nvlink_errors"), "growth", 100, _MINUTE_S, "watch", _DCGM),
    Rule("gpu_nvlinks", "gpu", "NVLinks that are up", _field("nvlinks_up"), "drop", 0, _MINUTE_S, "drain", _DCGM),
    Rule(
        "gpu_hot",
        "gpu",
        "degrees Celsius",
        _field("temperature_c"),
        "above",
        90,
        _MINUTE_S,
        "watch",
        _OWN + "data-centre accelerators slow down a few degrees above",
    ),
    Rule("gpu_slowed", "gpu", "held down by heat or power", _is_slowed, "above", 0, _MINUTE_S, "watch", _OWN + "shorter ones are normal"),
    Rule("port_down", "port", "the port is up", _is_up, "drop", 0, 0, "drain", _OWN + "ranks that use it wait for their time-out"),
    Rule("port_rate", "port", "Gbit/s", _field("rate_gbps"), "drop", 0, 0, "drain", _OWN + "it trained at a lower rate"),
    Rule(
        "port_link_downed",
        "port",
        "the link went down",
        _counter("link_downed"),
        "growth",
        0,
        _HOUR_S,
        "drain",
        _OWN + "healthy ones never do",
    ),
    Rule(
        "port_recoveries",
        "port",
        "link recoveries",
        _counter("link_error_recovery"),
        "growth",
        10,
        _HOUR_S,
        "watch",
        "what InfiniBand administrators tolerate",
    ),
    Rule(
        "port_symbols",
        "port",
        "symbol errors",
        _counter("symbol_error"),
        "growth",
        120,
        _HOUR_S,
        "watch",
        "InfiniBand's bit error rate of 1e-12",
    ),
    Rule("port_receive", "port", "bad packets received", _counter("port_rcv_errors"), "growth", 10, _HOUR_S, "watch", "as for recoveries"),
    Rule(
        "port_ack",
        "port",
        "acknowledgements that did not come",
        _counter("hw.local_ack_timeout_err"),
        "growth",
        100,
        _HOUR_S,
        "watch",
        _OWN + "each one stalls a collective",
    ),
    Rule("host_oom", "host", "kills for lack of memory", _field("oom_kills"), "growth", 0, _HOUR_S, "watch", _OWN + "one may hit a rank"),
    Rule(
        "host_memory",
        "host",
        "share of memory that is available",
        _share("memory_available_bytes", "memory_total_bytes"),
        "below",
        0.05,
        _MINUTE_S,
        "watch",
        _OWN + "the kernel soon kills",
    ),
    Rule(
        "host_stall",
        "host",
        "percent of time in which all wait for memory",
        _field("memory_full_percent"),
        "above",
        20,
        _MINUTE_S,
        "watch",
        _OWN + "a host that thrashes slows every rank of the job",
    ),
    Rule(
        "host_ecc_bad", "host", "uncorrected memory errors", _field("ecc_uncorrected"), "growth", 0, _HOUR_S, "drain", _OWN + "wrong bits"
    ),
    Rule(
        "host_ecc_good",
        "host",
        "corrected memory errors",
        _field("ecc_corrected"),
        "growth",
        100,
        _HOUR_S,
        "watch",
        _OWN + "most hosts never show one",
    ),
    Rule(
        "host_clock",
        "host",
        "the clock follows nobody",
        _is_unsynchronized,
        "above",
        0,
        _HOUR_S,
        "watch",
        _OWN + "stamps of nodes drift apart; leases do not depend on it",
    ),
    Rule(
        "disk_space", "disk", "share that is free", _share("free_bytes", "total_bytes"), "below", 0.03, 0, "watch", _OWN + "saves fail soon"
    ),
    Rule(
        "disk_inodes", "disk", "share of inodes free", _share("free_inodes", "total_inodes"), "below", 0.03, 0, "watch", _OWN + "the same"
    ),
)
