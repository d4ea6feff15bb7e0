"""What this machine itself says about ends of processes: kills for lack of memory that it counted, lines of its kernel log."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from surefoot.coordinate.causes import HostFacts
from surefoot.coordinate.telemetry.kernel_log import oom_pids, parse_kernel_log, since, xids_of

_CGROUPS = Path("/sys/fs/cgroup")
_RECORD_BYTES = 8192  # the longest record that the kernel gives
_MAX_RECORDS = 100_000  # more than its buffer ever holds


class HostWatch:
    """Remembers how things stood when it was made: what came before a generation explains no end in it."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._num_oom_kills = num_oom_kills()

    def facts(self, *, asked_to_leave: bool) -> HostFacts:
        """What has come since. A machine that tells nothing (an unreadable log, no counter) adds nothing, which is no proof of health."""
        events = since(parse_kernel_log(_kernel_log()), stamp_s=self._since_s)
        return HostFacts(
            num_oom_kills=max(0, num_oom_kills() - self._num_oom_kills),
            oom_pids=oom_pids(events),
            xids=xids_of(events),
            asked_to_leave=asked_to_leave,
        )


def num_oom_kills(*, cgroups: Path = _CGROUPS, proc: Path = Path("/proc")) -> int:
    """How many processes were killed for lack of memory: of our own control group, where there is one, else of the whole machine."""
    for path in (*_own_group_files(cgroups, proc), proc / "vmstat"):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return 0


def _own_group_files(cgroups: Path, proc: Path) -> list[Path]:
    """Of both versions; the group itself, and the root of what a container is shown."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            files += [cgroups / group.lstrip("/") / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            files += [cgroups / "memory" / group.lstrip("/") / "memory.oom_control", cgroups / "memory" / "memory.oom_control"]
    return files


def _kernel_log() -> str:
    """All that the kernel still has, empty where it may not be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    records = []
    try:
        for _ in range(_MAX_RECORDS):
            records.append(os.read(fd, _RECORD_BYTES))
    except OSError:
        pass  # the end, or a record that was overwritten while we read: what was read counts
    finally:
        os.close(fd)
    return b"".join(records).decode(errors="replace")
