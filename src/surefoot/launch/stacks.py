"""The stacks of ranks, hung or not: asked for by signal, read from the file that each answers in, folded into what is hottest."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from surefoot.launch.logs import stacks_path
from surefoot.launch.process import STACKS_SIGNAL, catches
from surefoot.launch.processes import ProcessView, look_at

_LOOK_S = 0.01
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>[^\]]*)\])? .*\(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Innermost frame first; of Python only."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """`threads` is empty when the rank did not answer; `why` says what was in the way. The process was looked at after the wait."""

    rank: int
    pid: int
    process: ProcessView
    threads: tuple[ThreadStack, ...] = ()
    why: str = ""


def ask_stacks(run_dir: Path, generation: int, pids: Mapping[int, int], *, limit_s: float) -> list[Answer]:
    """The stacks of the ranks in `pids`, all asked at once; who has not answered after `limit_s` is told by the kernel instead.

    A signal goes to a process that has a handler for it only, by its pidfd: none that took the number over since is hit.
    """
    begun = {rank: _size(stacks_path(run_dir, generation, rank)) for rank in pids}
    refused = {rank: why for rank, pid in pids.items() if (why := _ask(pid))}
    told: dict[int, str] = {}
    waiting = set(pids) - set(refused)
    give_up_s = time.monotonic() + limit_s
    while waiting and time.monotonic() < give_up_s:
        time.sleep(_LOOK_S)
        for rank in sorted(waiting):
            text = _read_from(stacks_path(run_dir, generation, rank), begun[rank])
            if text and text == told.get(rank):
                waiting.discard(rank)  # faulthandler writes without a pause: what did not grow in a whole look is all of it
            told[rank] = text
    late = f"did not answer within {limit_s:g} s"
    return [
        Answer(rank, pid, look_at(pid), parse_stacks(told.get(rank, "")), refused.get(rank) or (late if rank in waiting else ""))
        for rank, pid in sorted(pids.items())
    ]


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """What faulthandler wrote, the thread that was interrupted first."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            threads.append((thread["name"] or "", []))
        elif (frame := _FRAME.match(line)) is not None and threads:
            threads[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return tuple(ThreadStack(name, tuple(frames)) for name, frames in threads)


def hottest(samples: Iterable[Sequence[ThreadStack]], *, num_lines: int) -> list[tuple[Frame, float]]:
    """The innermost lines of the sampled main threads, and the share of the samples in which each was there; the hottest first."""
    counts: Counter[Frame] = Counter()
    num_samples = 0
    for threads in samples:
        num_samples += 1
        main = main_thread(threads)
        if main is not None and main.frames:
            counts[main.frames[0]] += 1
    return [(frame, count / num_samples) for frame, count in counts.most_common(num_lines)]


def main_thread(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """The one whose outermost frame is the oldest: faulthandler lists the newest thread first, and the main one last."""
    return threads[-1] if threads else None


def _ask(pid: int) -> str:
    """Why it was not asked; empty when it was."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if not catches(pid, STACKS_SIGNAL):
                return "has not registered for it yet, or is not a rank of this release"
            signal.pidfd_send_signal(pidfd, STACKS_SIGNAL)
            return ""
        except PermissionError:
            return "belongs to another user"
        finally:
            os.close(pidfd)
    return "is gone"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
