"""One look at this node: reads /proc, /sys and the kernel log, and asks the accelerators, each in a bounded time.

What cannot be read is named in `unread`, with the reason, and never stands as zero. Files are read from below `root`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from surefoot.coordinate.telemetry.gpu_xml import parse_nvidia_smi
from surefoot.coordinate.telemetry.host import parse_diskstats, parse_host
from surefoot.coordinate.telemetry.infiniband import parse_ports
from surefoot.coordinate.telemetry.kernel_log import KernelEvent, parse_kernel_log
from surefoot.coordinate.telemetry.nvml import NvmlAbsent, load_nvml, read_gpus
from surefoot.coordinate.telemetry.records import DiskSample, GpuSample, HostSample, PortSample

_HOST_FILES: Final = ("proc/meminfo", "proc/vmstat", "proc/loadavg", "proc/pressure/cpu", "proc/pressure/memory", "proc/pressure/io")
_PORT_FILES: Final = (
    "ports/*/state",
    "ports/*/phys_state",
    "ports/*/rate",
    "ports/*/link_layer",
    "ports/*/counters/*",
    "ports/*/hw_counters/*",
)
_MAX_FILE_BYTES: Final = 1 << 20
_KMSG_BYTES: Final = 8192  # the kernel's own bound of one record
_MAX_KMSG: Final = 20_000
_STA_UNSYNC: Final = 0x40


def read_host(root: Path = Path("/")) -> HostSample:
    """Never raises: each figure is known or not."""
    files = {name: text for name in _HOST_FILES if (text := _text(root / name)) is not None}
    for path in (root / "sys/devices/system/edac/mc").glob("mc*/*_count"):
        if (text := _text(path)) is not None:
            files[str(path.relative_to(root))] = text
    synchronized, error_s = _clock() if root == Path("/") else (None, None)
    return replace(parse_host(files, num_cores=os.cpu_count()), clock_is_synchronized=synchronized, clock_error_s=error_s)


def read_ports(root: Path = Path("/")) -> tuple[PortSample, ...]:
    folder = root / "sys/class/infiniband"
    files: dict[str, str] = {}
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        for pattern in (*_PORT_FILES, "device/net/*/operstate", "device/net/*/dev_port"):
            files |= {str(path): text for path in device.glob(pattern) if (text := _text(path)) is not None}
    return parse_ports(files)


def read_disk(path: Path, *, root: Path = Path("/")) -> DiskSample:
    """The file system that holds `path`. One that does not answer hangs the caller, as it would hang a save."""
    try:
        space, device = os.statvfs(path), path.stat().st_dev
    except OSError:
        return DiskSample(path.name)
    stats = parse_diskstats(_text(root / "proc/diskstats") or "").get((os.major(device), os.minor(device)))
    read_bytes, written_bytes, io_s = stats or (None, None, None)
    return DiskSample(
        path=path.name,  # a run that is copied elsewhere names no place
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        free_inodes=space.f_favail if space.f_files else None,
        total_inodes=space.f_files or None,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        io_s=io_s,
    )


class Gpus:
    """Asks the driver's library where it can be had, else `nvidia-smi`; `why_not` says why neither answers."""

    def __init__(self, *, limit_s: float, command: Sequence[str] = ("nvidia-smi", "-q", "-x")) -> None:
        self._limit_s = limit_s
        self._command = tuple(command)
        self._nvml: Any = None
        self.why_not = ""
        try:
            self._nvml = load_nvml()
        except NvmlAbsent as error:
            self.why_not = str(error)

    def read(self) -> tuple[GpuSample, ...]:
        """Empty with `why_not` set when nobody answers; with it empty, this node has none that can be seen."""
        if self._nvml is not None:
            try:
                gpus = read_gpus(self._nvml)
                self.why_not = ""
                return gpus
            except NvmlAbsent as error:
                self.why_not = str(error)
                return ()
        return self._by_command()

    def _by_command(self) -> tuple[GpuSample, ...]:
        try:
            answer = subprocess.run(self._command, capture_output=True, timeout=self._limit_s, check=False, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            self.why_not = f"there is no {self._command[0]}"
            return ()
        except subprocess.TimeoutExpired:
            self.why_not = f"{self._command[0]} did not answer within {self._limit_s:g} s"
            return ()
        except OSError as error:
            self.why_not = f"{self._command[0]}: {error.strerror}"
            return ()
        gpus = parse_nvidia_smi(answer.stdout)
        words = answer.stderr.decode(errors="replace").strip() or f"exit code {answer.returncode}"
        self.why_not = "" if gpus else f"{self._command[0]}: {words}"
        return gpus


class KernelLog:
    """What the kernel logged since the last look. It starts at the end, so that what an earlier job caused is not laid to this one."""

    def __init__(self, path: Path = Path("/dev/kmsg"), *, from_start: bool = False) -> None:
        self.why_not = ""
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if not from_start:
                os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self.why_not = f"{path}: {error.strerror}"

    def read(self) -> tuple[KernelEvent, ...]:
        return parse_kernel_log("".join(self._records())) if self._fd >= 0 else ()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _records(self) -> Iterator[str]:
        for _ in range(_MAX_KMSG):
            try:
                record = os.read(self._fd, _KMSG_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # what was not read in time is overwritten; the next call goes on with the oldest that is left
                self.why_not = f"kernel log: {error.strerror}"
                return
            if not record:
                return
            yield record.decode(errors="replace")


def boot_id(root: Path = Path("/")) -> str:
    return (_text(root / "proc/sys/kernel/random/boot_id") or "").strip()


def _text(path: Path) -> str | None:
    """A small file of the kernel's; None where it is not there or refuses, as counters of a port that is down do."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return None


class _Timex(ctypes.Structure):
    """The head of the kernel's struct timex, with room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def _clock() -> tuple[bool | None, float | None]:
    """Whether something keeps the clock right, and by how much it may be wrong at most, in s. Asks without setting anything."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None, None
    return (None, None) if state < 0 else (not timex.status & _STA_UNSYNC, timex.maxerror / 1e6)
