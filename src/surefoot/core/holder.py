"""A process named so that others can tell whether it still runs, and what a run's lock file says about its owner."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from surefoot.core import strict_json

LOCK_NAME = "lock"
LOCK_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Holder:
    """A pid alone may be somebody else's by now: the boot, the pid namespace and the start time (clock ticks since boot) pin it down."""

    host: str
    boot_id: str
    pid: int
    pid_start_time: int
    pid_namespace: int


def this_process() -> Holder:
    pid = os.getpid()
    return Holder(
        host=socket.gethostname(), boot_id=_boot_id(), pid=pid, pid_start_time=_start_time(pid) or 0, pid_namespace=_pid_namespace()
    )


def is_alive(holder: Holder, *, seen_from: Holder) -> bool | None:
    """Whether `holder` still runs; None where `seen_from` cannot tell (another host, boot or container): then only a lease can say.

    A host of the same name under another boot is no proof of a restart: machines made from one image often share their name. A zombie is
    dead: it holds nothing any more, its parent has merely not looked yet.
    """
    here = (seen_from.host, seen_from.boot_id, seen_from.pid_namespace)
    if (holder.host, holder.boot_id, holder.pid_namespace) != here:
        return None
    start_time = _start_time(holder.pid)
    return start_time is not None and holder.pid_start_time in (0, start_time)


@dataclass(frozen=True, slots=True)
class LockRecord:
    """The content of `<run>/lock`. It carries its own lease, so that a reader needs no config to judge it."""

    job: str
    holder: Holder
    generation: int
    renewed_at: str
    lease_s: float

    def as_json(self) -> dict[str, object]:
        holder = self.holder
        return {
            "format_version": LOCK_FORMAT,
            "job": self.job,
            "host": holder.host,
            "boot_id": holder.boot_id,
            "pid": holder.pid,
            "pid_start_time": holder.pid_start_time,
            "pid_namespace": holder.pid_namespace,
            "generation": self.generation,
            "renewed_at": self.renewed_at,
            "lease_s": self.lease_s,
        }

    def age_s(self, now_utc: str) -> float:
        """Seconds since it was renewed. Two hosts' clocks are compared here, so never negative."""
        return max(0.0, seconds_between(self.renewed_at, now_utc))


def parse_lock(content: bytes) -> LockRecord | None:
    """None when `content` is no lock record: half written, or damaged."""
    try:
        raw = strict_json.loads(content)
        return _lock_record(raw) if isinstance(raw, Mapping) else None
    except (ValueError, KeyError, TypeError):
        return None


def _lock_record(raw: Mapping[str, object]) -> LockRecord:
    seconds_between(str(raw["renewed_at"]), str(raw["renewed_at"]))
    return LockRecord(
        job=str(raw["job"]),
        holder=Holder(
            host=str(raw["host"]),
            boot_id=str(raw["boot_id"]),
            pid=int(str(raw["pid"])),
            pid_start_time=int(str(raw["pid_start_time"])),
            pid_namespace=int(str(raw["pid_namespace"])),
        ),
        generation=int(str(raw["generation"])),
        renewed_at=str(raw["renewed_at"]),
        lease_s=float(str(raw["lease_s"])),
    )


def seconds_between(start_utc: str, end_utc: str) -> float:
    """Seconds from one stamp of `Clock.utc` to another; ValueError when one is not such a stamp."""
    return datetime.fromisoformat(end_utc).timestamp() - datetime.fromisoformat(start_utc).timestamp()


def _start_time(pid: int) -> int | None:
    """Start of a live process in clock ticks since boot; 0 where the system does not say; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _start_time_unknown(pid)
    # The command name may hold spaces and brackets: fields are counted from the last bracket.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _start_time_unknown(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except FileNotFoundError:
        return 0
