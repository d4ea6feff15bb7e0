"""The host out of files of /proc and /sys, by their paths below the root. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from surefoot.coordinate.telemetry.records import HostSample
from surefoot.coordinate.telemetry.words import count, number, total

_EDAC = re.compile(r"sys/devices/system/edac/mc/mc\d+/(?P<kind>ce|ue)(?:_noinfo)?_count$")
_SECTOR_BYTES = 512  # whatever the device's own sectors are, the kernel counts in these


def parse_host(files: Mapping[str, str], *, num_cores: int | None = None) -> HostSample:
    """`files` are contents by path, "proc/meminfo". What is missing or cut off is unknown."""
    memory = {name: value for name, value in _fields(files.get("proc/meminfo", ""), separator=":")}
    vmstat = {name: count(value) for name, value in _fields(files.get("proc/vmstat", ""), separator=" ")}
    edac = {path: (match["kind"], count(text.strip())) for path, text in files.items() if (match := _EDAC.search(path)) is not None}
    swap_total, swap_free = _kib(memory.get("SwapTotal")), _kib(memory.get("SwapFree"))
    return HostSample(
        memory_total_bytes=_kib(memory.get("MemTotal")),
        memory_available_bytes=_kib(memory.get("MemAvailable")),
        swap_used_bytes=None if swap_total is None or swap_free is None else max(0, swap_total - swap_free),
        oom_kills=vmstat.get("oom_kill"),
        load_1m=number((files.get("proc/loadavg", "").split() or [""])[0]),
        num_cores=num_cores,
        cpu_some_percent=parse_pressure(files.get("proc/pressure/cpu", ""), "some"),
        memory_some_percent=parse_pressure(files.get("proc/pressure/memory", ""), "some"),
        memory_full_percent=parse_pressure(files.get("proc/pressure/memory", ""), "full"),
        io_full_percent=parse_pressure(files.get("proc/pressure/io", ""), "full"),
        ecc_corrected=total(value for kind, value in edac.values() if kind == "ce"),
        ecc_uncorrected=total(value for kind, value in edac.values() if kind == "ue"),
    )


def parse_pressure(text: str, kind: str) -> float | None:
    """The average over 10 s, in percent, of the line that begins with `kind`."""
    for line in text.splitlines():
        words = line.split()
        if words and words[0] == kind:
            return next((number(word.removeprefix("avg10=")) for word in words[1:] if word.startswith("avg10=")), None)
    return None


def parse_diskstats(text: str) -> dict[tuple[int, int], tuple[int, int, float]]:
    """(bytes read, bytes written, seconds busy) since boot by (major, minor) number of the device."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        numbers = [count(words[index]) for index in (0, 1, 5, 9, 12)] if len(words) >= 14 else []
        if numbers and None not in numbers:
            major, minor, read, written, busy_ms = (value or 0 for value in numbers)
            found[major, minor] = (read * _SECTOR_BYTES, written * _SECTOR_BYTES, busy_ms / 1e3)
    return found


def _fields(text: str, *, separator: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, found, value = line.partition(separator)
        if found:
            yield name.strip(), value.strip()


def _kib(text: str | None) -> int | None:
    """A size of /proc/meminfo; without its unit it is cut off, and unknown."""
    if text is None or not text.endswith(" kB"):
        return None
    value = count(text.removesuffix(" kB"))
    return None if value is None else value << 10
