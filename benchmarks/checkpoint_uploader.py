"""The other process of benchmarks/checkpoint.py: what an agent's uploader does, without the ledger. Arguments: ROOT RANK:NUMBER:FD ...

Says "ready", then its CPU-seconds for each byte that it gets, and ends with its stdin. No torch, as the real one.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.checkpoint.upload import Uploader
from surefoot.launch.process import let_others_first

LIMIT_S = 600.0


class OtherProcess:
    """A running uploader; `cpu_s` so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        assert self._stdout.readline() == b"ready\n"

    def cpu_s(self) -> float:
        self._stdin.write(b"?")
        self._stdin.flush()
        return float(self._stdout.readline())


@contextmanager
def uploading(root: Path, slots: Sequence[Slot]) -> Iterator[OtherProcess]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.checkpoint_uploader",
        str(root),
        *(f"{slot.rank}:{slot.number}:{slot.fd}" for slot in slots),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[slot.fd for slot in slots]) as process:
        try:
            yield OtherProcess(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def was_committed(slot: Slot) -> bool:
    assert slot.state() is not SlotState.FAILED, slot.header()
    return slot.state() is SlotState.COMMITTED


def was_read_back(slot: Slot) -> bool:
    header = slot.header()
    return was_committed(slot) and header is not None and header.read_back != ""


def main() -> None:
    let_others_first()
    slots = []
    for told in sys.argv[2:]:
        rank, number, fd = map(int, told.split(":"))
        slots.append(Slot.open(fd, rank=rank, number=number))
    uploader = Uploader(Path(sys.argv[1]), slots, limit_s=LIMIT_S, on_read_back=lambda back: None)
    os.set_blocking(0, False)
    began_s = cpu_s()
    print("ready", flush=True)
    while True:
        busy = uploader.step()
        try:
            if (asked := os.read(0, 1)) == b"":
                return
        except BlockingIOError:
            asked = b""
        if asked:
            print(cpu_s() - began_s, flush=True)
        elif not busy:
            time.sleep(0.02)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
