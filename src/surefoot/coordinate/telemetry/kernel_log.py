"""What the kernel log says about accelerators, switches, memory and crashes: one record per event, however many lines it has. Pure.

The log comes as `dmesg` prints it, with or without stamps, as lines of /dev/kmsg, or out of a journal: what stands before the message is
passed over. A line that does not have the form of its kind is no event, so a log that somebody else garbled gives fewer, never others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class XidEvent:
    """An error that the accelerator's driver logged. `device` is its PCI address, `num_lines` how many lines told of it.

    `process` is the one that it happened to, None where the driver knows none. `is_fatal` where the message says so, as those of NVLink do.
    """

    device: str
    code: int
    message: str
    pid: int | None = None
    process: str | None = None
    is_fatal: bool | None = None
    num_lines: int = 1
    stamp_s: float | None = None

    @property
    def name(self) -> str:
        return f"Xid {self.code} on {self.device}"


@dataclass(frozen=True, slots=True)
class SXidEvent:
    """The same from an NVSwitch. `link` is None where none is named."""

    device: str
    code: int
    message: str
    link: int | None = None
    is_fatal: bool | None = None
    num_lines: int = 1
    stamp_s: float | None = None

    @property
    def name(self) -> str:
        return f"SXid {self.code} on {self.device}"


@dataclass(frozen=True, slots=True)
class OomKill:
    """A process that the kernel killed for lack of memory: of the machine, or of its own control group."""

    pid: int
    process: str
    in_cgroup: bool
    stamp_s: float | None = None


@dataclass(frozen=True, slots=True)
class Crash:
    """A process that touched memory which is not its own; `library` is where its code stood."""

    pid: int
    process: str
    library: str | None
    stamp_s: float | None = None


KernelEvent = XidEvent | SXidEvent | OomKill | Crash

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)[^)]*\): (?P<code>\d+)(?:, ?(?P<rest>.*))?$")
_SXID = re.compile(r"SXid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)[^)]*\): (?P<code>\d+)(?:, ?(?P<rest>.*))?$")
_PID = re.compile(r"^pid='?(?P<pid>[^,']*)'?(?:, name=(?P<name>[^,]*))?(?:, |$)")
_OOM = re.compile(r"(?P<cgroup>Memory cgroup out|Out) of memory: Killed process (?P<pid>\d+)[^(]*\((?P<name>[^)]*)\)")
_CRASH = re.compile(r"(?P<name>[^\s\[][^\[]*)\[(?P<pid>\d+)\]: segfault at [0-9a-f]+ ip [0-9a-f]+.*?(?: in (?P<library>[^\[\s]+)|$)")
_LINK = re.compile(r"\bLink (?P<link>\d+)\b")
_FATAL = re.compile(r"\b(?P<not>Non-?)?fatal\b", re.IGNORECASE)
# Lines that the driver adds to an error for its engineers: a table of calls, the state of a switch's engine.
_XID_MORE = re.compile(r"NVRM:\s+(?:GPU\d* |entry |-?\d+ +\d+ |\S*Xid history|.*RPC (?:buffer|history|event)|krcWatchdog|_)")
_SXID_MORE = re.compile(r"^(?:Severity \d|Data \{)")
_SECONDS = re.compile(r"^\s*\[\s*(?P<s>\d+\.\d+)\]")
_KMSG = re.compile(r"^\d+,\d+,(?P<us>\d+),[^;]*;")


def parse_kernel_log(log: str | bytes | Iterable[str]) -> tuple[KernelEvent, ...]:
    """In the order of the log. `stamp_s` is seconds since boot, None where the log has wall time or none."""
    if isinstance(log, bytes):
        log = log.decode(errors="replace")
    events: list[KernelEvent] = []
    for line in log.splitlines() if isinstance(log, str) else log:
        event = _event(line.rstrip("\n"))
        if event is not None and (merged := _merged(events[-1] if events else None, event)) is not None:
            events[-1] = merged
        elif event is not None:
            events.append(event)
        elif events and isinstance(events[-1], XidEvent) and _XID_MORE.search(line):
            events[-1] = _longer(events[-1])
    return tuple(events)


def xids_of(events: Iterable[KernelEvent]) -> tuple[str, ...]:
    """The accelerator and switch errors in words, each once, in order."""
    return tuple(dict.fromkeys(event.name for event in events if isinstance(event, XidEvent | SXidEvent)))


def oom_pids(events: Iterable[KernelEvent]) -> frozenset[int]:
    """Whom the kernel killed for lack of memory."""
    return frozenset(event.pid for event in events if isinstance(event, OomKill))


def since(events: Iterable[KernelEvent], *, stamp_s: float) -> tuple[KernelEvent, ...]:
    """Those at or after so many seconds since boot. What carries no such stamp cannot be placed, and is left out."""
    return tuple(event for event in events if event.stamp_s is not None and event.stamp_s >= stamp_s)


def _event(line: str) -> KernelEvent | None:
    if (found := _XID.search(line)) is not None:
        return _xid(found, stamp_s=_stamp_s(line))
    if (found := _SXID.search(line)) is not None:
        return _sxid(found, stamp_s=_stamp_s(line))
    if (found := _OOM.search(line)) is not None:
        return OomKill(int(found["pid"]), found["name"], found["cgroup"].startswith("Memory"), _stamp_s(line))
    if (found := _CRASH.search(line)) is not None:
        return Crash(int(found["pid"]), found["name"].split()[-1], found["library"], _stamp_s(line))
    return None


def _xid(found: re.Match[str], *, stamp_s: float | None) -> XidEvent:
    rest = (found["rest"] or "").strip()
    pid, process = None, None
    if (who := _PID.match(rest)) is not None:
        pid = int(who["pid"]) if who["pid"].isdigit() else None
        process = who["name"] if who["name"] and not who["name"].startswith("<") else None
        rest = rest[who.end() :]
    return XidEvent(found["device"].lower(), int(found["code"]), rest, pid, process, _is_fatal(rest), stamp_s=stamp_s)


def _sxid(found: re.Match[str], *, stamp_s: float | None) -> SXidEvent:
    rest = (found["rest"] or "").strip()
    link = _LINK.search(rest)
    return SXidEvent(found["device"].lower(), int(found["code"]), rest, int(link["link"]) if link else None, _is_fatal(rest), 1, stamp_s)


def _merged(before: KernelEvent | None, event: KernelEvent) -> KernelEvent | None:
    """A switch tells of one error in up to three lines of one code; None where `event` is one of its own."""
    if not (isinstance(before, SXidEvent) and isinstance(event, SXidEvent) and _SXID_MORE.match(event.message)):
        return None
    return _longer(before) if (before.device, before.code) == (event.device, event.code) else None


def _longer(event: XidEvent | SXidEvent) -> XidEvent | SXidEvent:
    return replace(event, num_lines=event.num_lines + 1)


def _is_fatal(message: str) -> bool | None:
    found = _FATAL.search(message)
    return None if found is None else found["not"] is None


def _stamp_s(line: str) -> float | None:
    if (found := _SECONDS.match(line)) is not None:
        return float(found["s"])
    found = _KMSG.match(line)
    return int(found["us"]) / 1e6 if found is not None else None
