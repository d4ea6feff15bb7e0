"""The probes that look at what the node shows of itself: each returns a result, is called in a child process, and may hang there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from surefoot.coordinate.probes.records import ProbeResult
from surefoot.coordinate.telemetry.collect import Gpus, KernelLog, read_disk, read_host, read_ports
from surefoot.coordinate.telemetry.infiniband import port_faults
from surefoot.coordinate.telemetry.kernel_log import SXidEvent, XidEvent, since
from surefoot.coordinate.telemetry.records import GpuSample
from surefoot.coordinate.telemetry.xids import Advice, judge_xid, worst_advice

_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class ProbeWish:
    """What the probes are to look at. `since_boot_s`: Xids before it are somebody else's. `num_gpus` 0 takes what is there.

    `min_free_bytes` and `min_bytes_per_s` of the folder that saves go to; 0 wants nothing. `unused_ports` by name, "mlx5_3/1".
    """

    folder: str = "."
    num_gpus: int = 0
    port_gbps: float = 0.0
    unused_ports: tuple[str, ...] = ()
    since_boot_s: float = 0.0
    min_free_bytes: int = 1 << 30
    min_bytes_per_s: float = 0.0
    disk_bytes: int = 32 << 20
    num_ranks: int = 2
    device: str = "cpu"
    seed: int = 0


def probe_gpus(wish: ProbeWish, *, gpus: Gpus | None = None) -> ProbeResult:
    """Whether all accelerators answer, and none of them says that it needs a repair."""
    asked = gpus or Gpus(limit_s=30.0)
    found = asked.read()
    figures: dict[str, object] = {"num_gpus": len(found)}
    if not found:
        missing = wish.num_gpus > 0
        reason = (
            f"{wish.num_gpus} accelerators are wanted and none answers: {asked.why_not}" if missing else asked.why_not or "no accelerator"
        )
        return ProbeResult("gpu", "failed" if missing else "unknown", reason, figures)
    if len(found) < wish.num_gpus:
        return ProbeResult("gpu", "failed", f"{len(found)} of {wish.num_gpus} accelerators answer", figures)
    faults = [fault for gpu in found for fault in gpu_faults(gpu)]
    return ProbeResult("gpu", "failed" if faults else "ok", "; ".join(faults) or f"{len(found)} accelerators answer", figures)


def gpu_faults(gpu: GpuSample) -> list[str]:
    """What an accelerator says of itself that forbids to train on it. What it does not say is no fault."""
    found = []
    if gpu.remap_failed:
        found.append(f"gpu {gpu.id}: a memory row could not be remapped")
    if gpu.remap_pending:
        found.append(f"gpu {gpu.id}: a memory row waits for a reset to be remapped")
    if gpu.ecc_volatile_uncorrected:
        found.append(f"gpu {gpu.id}: {gpu.ecc_volatile_uncorrected} uncorrected memory errors since its driver was loaded")
    if gpu.recovery_action is not None and gpu.recovery_action.lower() != "none":
        found.append(f"gpu {gpu.id}: the driver asks for {gpu.recovery_action}")
    if gpu.nvlinks and gpu.nvlinks_up is not None and 0 < gpu.nvlinks_up < gpu.nvlinks:
        found.append(f"gpu {gpu.id}: {gpu.nvlinks_up} of {gpu.nvlinks} NVLinks are up")
    return found


def probe_xids(wish: ProbeWish, *, log: KernelLog | None = None) -> ProbeResult:
    """Errors of the accelerator's driver since `since_boot_s`. A log that may not be read says nothing."""
    log = log or KernelLog(from_start=True)
    events = since(log.read(), stamp_s=wish.since_boot_s)
    if log.why_not:
        return ProbeResult("xid", "unknown", log.why_not)
    worst = worst_advice(events)
    figures = {"xids": [judge_xid(event).reason for event in events if isinstance(event, XidEvent | SXidEvent)][-20:]}
    if worst is None:
        return ProbeResult("xid", "ok", "none in the kernel log", figures)
    bad = worst.advice in (Advice.RESET, Advice.DRAIN)
    return ProbeResult("xid", "failed" if bad else "ok", f"{worst.reason} ({worst.advice.value})", figures)


def probe_ports(wish: ProbeWish, *, root: Path = _ROOT) -> ProbeResult:
    """Whether the ports of the fabric are up and as fast as they should be."""
    ports = read_ports(root)
    if not ports:
        return ProbeResult("ports", "unknown", "no InfiniBand or RoCE adapter")
    faults = port_faults(ports, wanted_gbps=wish.port_gbps or None, unused=frozenset(wish.unused_ports))
    figures = {"rates_gbps": {port.id: port.rate_gbps for port in ports}}
    return ProbeResult("ports", "failed" if faults else "ok", "; ".join(fault.reason for fault in faults) or f"{len(ports)} ports", figures)


def probe_memory(wish: ProbeWish, *, root: Path = _ROOT) -> ProbeResult:
    """Uncorrected errors of the host's memory since boot, where its controller is there to tell."""
    host = read_host(root)
    figures = {
        "ecc_corrected": host.ecc_corrected,
        "ecc_uncorrected": host.ecc_uncorrected,
        "available_bytes": host.memory_available_bytes,
        "oom_kills": host.oom_kills,
    }
    if host.ecc_uncorrected:
        return ProbeResult("memory", "failed", f"{host.ecc_uncorrected} uncorrected errors of host memory since boot", figures)
    if host.ecc_uncorrected is None:
        return ProbeResult("memory", "unknown", "no memory controller tells of errors", figures)
    return ProbeResult("memory", "ok", f"{host.ecc_corrected or 0} corrected errors since boot", figures)


def probe_clock(wish: ProbeWish, *, root: Path = _ROOT) -> ProbeResult:
    """Whether something keeps this node's clock right. The offset to another node takes an exchange with it (`clock.py`)."""
    host = read_host(root)
    figures = {"error_s": host.clock_error_s}
    if host.clock_is_synchronized is None:
        return ProbeResult("clock", "unknown", "the kernel does not tell", figures)
    if not host.clock_is_synchronized:
        return ProbeResult("clock", "unknown", "no daemon keeps this clock, as in most containers, whose host may", figures)
    return ProbeResult("clock", "ok", f"kept to within {host.clock_error_s or 0.0:.3g} s", figures)


def probe_space(wish: ProbeWish) -> ProbeResult:
    """Room and inodes of the folder that saves go to."""
    disk = read_disk(Path(wish.folder))
    if disk.free_bytes is None:
        return ProbeResult("space", "failed", f"{wish.folder} cannot be looked at")
    figures = {"free_bytes": disk.free_bytes, "free_inodes": disk.free_inodes}
    if disk.free_bytes < wish.min_free_bytes:
        return ProbeResult(
            "space", "failed", f"{disk.free_bytes} bytes are free in {wish.folder}, {wish.min_free_bytes} are wanted", figures
        )
    return ProbeResult("space", "ok", f"{disk.free_bytes >> 20} MiB free", figures)


def probe_disk(wish: ProbeWish) -> ProbeResult:
    """Write, fsync and read back `disk_bytes` in the folder that saves go to: bandwidths, and that it gives back what it got.

    What is read comes past the page cache where the kernel drops it (POSIX_FADV_DONTNEED after the fsync), but not past one of a server.
    """
    path = Path(wish.folder) / f".surefoot-probe-{os.getpid()}"
    block = os.urandom(1 << 20)
    num_blocks = max(1, wish.disk_bytes >> 20)
    try:
        with path.open("wb") as file:
            begin_s = time.monotonic()
            for _ in range(num_blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write_s = time.monotonic() - begin_s
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with path.open("rb") as file:
            begin_s = time.monotonic()
            same = all(file.read(1 << 20) == block for _ in range(num_blocks))
            read_s = time.monotonic() - begin_s
    except OSError as error:
        return ProbeResult("disk", "failed", f"{wish.folder}: {error.strerror}")
    finally:
        path.unlink(missing_ok=True)
    figures = {"write_bytes_per_s": (num_blocks << 20) / write_s, "read_bytes_per_s": (num_blocks << 20) / read_s}
    if not same:
        return ProbeResult("disk", "failed", f"{wish.folder} gave back other bytes than were written", figures)
    if min(figures.values()) < wish.min_bytes_per_s:
        words = f"{min(figures.values()) / 1e6:.0f} MB/s in {wish.folder}, {wish.min_bytes_per_s / 1e6:.0f} are wanted"
        return ProbeResult("disk", "failed", words, figures)
    words = f"writes {figures['write_bytes_per_s'] / 1e6:.0f}, reads {figures['read_bytes_per_s'] / 1e6:.0f} MB/s"
    return ProbeResult("disk", "ok", words, figures)
