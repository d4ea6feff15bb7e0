"""What the processes of a live run hold of the machine's memory, and what they may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from surefoot.core.units import show_bytes
from surefoot.launch.processes import MemoryView, cgroup_memory, descendants, memory_of
from surefoot.observe.live import LiveRecord


def look_at_memory(live: LiveRecord, pids: Mapping[int, int]) -> tuple[dict[str, Any], list[str]]:
    """Ranks by their number, and all else that the agent started unless one rank was asked for. The answer, and the lines for people."""
    others = {pid: name for pid, name in descendants(live.pid) if pid not in {one.pid for one in live.ranks}}
    everybody = len(pids) == len(live.ranks)
    asked: list[tuple[str, int | None, int]] = [("rank", rank, pid) for rank, pid in sorted(pids.items())]
    asked += [("agent", None, live.pid), *(("aide", None, pid) for pid in others)] if everybody else []
    told, lines = [], []
    for role, rank, pid in asked:
        view = memory_of(pid)
        name = f"rank {rank}" if rank is not None else others.get(pid, role)
        told.append({"role": role, "rank": rank, "pid": pid, "name": name, **(_as_json(view) if view is not None else {"gone": True})})
        lines.append(f"  {name:<16} pid {pid:<8} {_words(view) if view is not None else 'gone'}")
    limit, use = cgroup_memory(live.pid)
    machine = psutil.virtual_memory()
    place = {
        "cgroup": {"limit_bytes": limit, "use_bytes": use},
        "machine": {"total_bytes": machine.total, "available_bytes": machine.available, "swap_used_bytes": psutil.swap_memory().used},
    }
    lines.append(f"  machine: {show_bytes(machine.available)} free of {show_bytes(machine.total)}")
    lines.append(f"  control group: {show_bytes(use) if use is not None else 'unknown'} of {show_bytes(limit) if limit else 'no limit'}")
    return {"processes": told, **place}, lines


def _as_json(view: MemoryView) -> dict[str, int]:
    return {
        "rss_bytes": view.rss_bytes,
        "anonymous_bytes": view.anonymous_bytes,
        "shared_bytes": view.shared_bytes,
        "slot_bytes": view.slot_bytes,
        "swap_bytes": view.swap_bytes,
        "peak_bytes": view.peak_bytes,
    }


def _words(view: MemoryView) -> str:
    sizes = (view.rss_bytes, view.shared_bytes, view.slot_bytes, view.swap_bytes, view.peak_bytes)
    return "{} resident, {} of them shared, {} in slots, {} swapped, {} at its peak".format(*map(show_bytes, sizes))
