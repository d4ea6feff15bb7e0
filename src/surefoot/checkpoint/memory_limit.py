"""How much memory this process may use: the machine's, or less where a container says so. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from surefoot.core.errors import ConfigError
from surefoot.core.units import show_bytes

_NO_LIMIT = 1 << 60  # cgroup v1 says "none" by a number near 2^63


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    num_bytes: int
    where: str


def memory_limit(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryLimit:
    """The lowest of the machine's memory and the limits of the control groups, v1 or v2, from this process's own up to the root."""
    limits = [MemoryLimit(_machine_bytes(proc), "this machine's memory")]
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            limits += _limits_above(cgroup, path, name="memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_above(cgroup / "memory", path, name="memory.limit_in_bytes")
    return min(limits, key=lambda limit: limit.num_bytes)


def slots_that_fit(slot_bytes: int, *, wanted: int, local_ranks: int, fraction: float, limit: MemoryLimit) -> int:
    """Pure. How many of the `wanted` slots per rank fit into `fraction` of the limit, when each local rank has as many of `slot_bytes`.

    Raises ConfigError with the numbers when not even one does.
    """
    room = int(limit.num_bytes * fraction)
    fit = room // max(1, slot_bytes * local_ranks)
    if fit < 1:
        raise ConfigError(
            f"a host copy of the state takes {show_bytes(slot_bytes)} on each of {local_ranks} ranks of this machine; "
            f"{fraction:g} of {limit.where}, {show_bytes(limit.num_bytes)}, are {show_bytes(room)}",
            where="[checkpoint] host_fraction",
            hint="raise host_fraction, run fewer ranks per machine, or shard the state over more ranks",
            slot_bytes=slot_bytes,
            local_ranks=local_ranks,
            room_bytes=room,
        )
    return min(wanted, fit)


def _machine_bytes(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits_above(root: Path, path: str, *, name: str) -> list[MemoryLimit]:
    """Inside a container the path may be that of the host, which is not there: the root of the mount is the container's own group."""
    folder = root / path.strip("/")
    found = []
    while True:
        file = folder / name
        text = next(iter(_lines(file)), "").strip()
        if text.isdigit() and int(text) < _NO_LIMIT:
            found.append(MemoryLimit(int(text), str(file)))
        if folder == root or root not in folder.parents:
            return found
        folder = folder.parent


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
