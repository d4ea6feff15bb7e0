"""What is known of a node at one moment. None is "nobody said": a counter that was not read is never 0. Records only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One accelerator. Volatile ECC counts since the driver was loaded, aggregate ones over its life.

    `slowed_by` are the reasons for which its clocks are held down now, without the idle ones; empty when there is none, None when nobody
    said. `nvlinks_up` of `nvlinks` carry data.
    """

    id: str
    name: str = ""
    uuid: str = ""
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    slow_temperature_c: float | None = None
    slowed_by: tuple[str, ...] | None = None
    ecc_is_on: bool | None = None
    ecc_volatile_corrected: int | None = None
    ecc_volatile_uncorrected: int | None = None
    ecc_aggregate_corrected: int | None = None
    ecc_aggregate_uncorrected: int | None = None
    remapped_rows_corrected: int | None = None
    remapped_rows_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pcie_replays: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    nvlink_errors: int | None = None
    recovery_action: str | None = None
    last_xid: int | None = None


@dataclass(frozen=True, slots=True)
class PortSample:
    """One port of an InfiniBand or RoCE adapter, `id` as "mlx5_0/1". `counters` by the kernel's names, data in units of 4 bytes.

    `interface_state` is that of the network interface over it.
    """

    id: str
    state: str | None = None
    physical_state: str | None = None
    rate_gbps: float | None = None
    link_layer: str | None = None
    interface_state: str | None = None
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiskSample:
    """One file system that the run writes to; `path` is the last part of its folder's.

    `io_s` is the time since boot that its device was busy; None where it has none of its own.
    """

    path: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    free_inodes: int | None = None
    total_inodes: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    io_s: float | None = None


@dataclass(frozen=True, slots=True)
class HostSample:
    """Pressure is the share of the last 10 s in which at least one task (`some`) or all of them (`full`) waited for the resource."""

    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    oom_kills: int | None = None
    load_1m: float | None = None
    num_cores: int | None = None
    cpu_some_percent: float | None = None
    memory_some_percent: float | None = None
    memory_full_percent: float | None = None
    io_full_percent: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    clock_is_synchronized: bool | None = None
    clock_error_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeSample:
    """Everything of one node at one moment. `time_utc` and `step` join it to the run; `unread` says what could not be read, and why."""

    node: str
    time_utc: str
    mono_s: float
    boot_id: str = ""
    generation: int | None = None
    attempt: int | None = None
    step: int | None = None
    host: HostSample = HostSample()
    disks: tuple[DiskSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    ports: tuple[PortSample, ...] = ()
    xids: tuple[str, ...] = ()
    unread: dict[str, str] = field(default_factory=dict)
