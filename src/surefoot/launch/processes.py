"""What the kernel tells about other processes of this machine: state, where they wait, their memory, whom they started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from surefoot.launch.process import process_state, waits_in

_PROC = Path("/proc")
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device, and deaf to signals",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "I": "idle",
    "X": "dead",
}
_KB = 1024


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One look. `state` is the letter of /proc/PID/stat, empty when the process is gone; texts are empty where they may not be read."""

    pid: int
    state: str
    waits_in: str = ""
    kernel_stack: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        what = _STATES.get(self.state, self.state) if self.state else "gone"
        return f"{what}, in {self.waits_in}" if self.waits_in else what


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Bytes of one process. `shared` are pages that others may have too: files and shared memory. `slot` are those of the copies that are
    being saved, as far as this process has touched them. `peak` is that of its life."""

    rss_bytes: int
    anonymous_bytes: int
    shared_bytes: int
    slot_bytes: int
    swap_bytes: int
    peak_bytes: int


def look_at(pid: int) -> ProcessView:
    return ProcessView(pid, process_state(pid), waits_in=waits_in(pid), kernel_stack=tuple(_text(pid, "stack").splitlines()))


def memory_of(pid: int) -> MemoryView | None:
    """None when the process is gone."""
    kilobytes = {name: int(words[0]) for name, words in _status(pid) if words and words[-1] == "kB"}
    if "VmRSS" not in kilobytes:
        return None
    shared = kilobytes.get("RssFile", 0) + kilobytes.get("RssShmem", 0)
    sizes = (kilobytes["VmRSS"], kilobytes.get("RssAnon", 0), shared, _slots_kb(pid), kilobytes.get("VmSwap", 0), kilobytes.get("VmHWM", 0))
    return MemoryView(*(size * _KB for size in sizes))


def descendants(pid: int) -> list[tuple[int, str]]:
    """(pid, name) of every process that it started, and that those started, parents first."""
    found = []
    for child in _children(pid):
        found.append((child, name_of(child)))
        found += descendants(child)
    return found


def name_of(pid: int) -> str:
    """The last part of the module that it runs, where it was started as one; else what the kernel calls it."""
    words = _text(pid, "cmdline").split("\0")
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return module.rpartition(".")[2] or _text(pid, "comm")


def cgroup_memory(pid: int) -> tuple[int | None, int | None]:
    """(limit, use) of the memory of its control group (v2), in bytes; None where there is no limit or the group cannot be seen."""
    path = next((line[3:] for line in _text(pid, "cgroup").splitlines() if line.startswith("0::")), "")
    folder = Path("/sys/fs/cgroup") / path.lstrip("/")
    return _number(folder / "memory.max"), _number(folder / "memory.current")


def _children(pid: int) -> Iterator[int]:
    """Of all its threads: a child belongs to the thread that forked it."""
    try:
        tasks = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return
    for task in tasks:
        try:
            yield from map(int, (_PROC / str(pid) / "task" / task / "children").read_text().split())
        except OSError:
            continue  # the thread ended


def _slots_kb(pid: int) -> int:
    """Resident memory of mappings of the agent's memfds, by their names."""
    total, in_slot = 0, False
    for line in _text(pid, "smaps").splitlines():
        if "-" in line.partition(" ")[0]:
            in_slot = "surefoot-slot" in line
        elif in_slot and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def _status(pid: int) -> Iterator[tuple[str, list[str]]]:
    for line in _text(pid, "status").splitlines():
        name, _, value = line.partition(":")
        yield name, value.split()


def _text(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # "max", or a machine without it
