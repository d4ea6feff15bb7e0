"""A toy job under stock torchrun, and what that makes of one fault: the other half of `benchmarks.faults`. Run as a script it is a rank.

Each rank averages one tensor per step, as the simplest data-parallel loop does, and writes down when it finished which step. The fault
comes once, in the first start of the workers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STEP_S: Final = 0.02
NUM_STEPS_AFTER: Final = 5
_FAILED = re.compile(r"failed \(exitcode: [^)]*\) local_rank: (\d+)")
_END_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Stock:
    """None where it did not happen within the bound. `culprit` is the rank of the line in which torchrun says what failed first."""

    detected_s: float | None
    culprit: int | None
    again_s: float | None


def under_torchrun(folder: Path, fault: str, *, rank: int, step: int, num_ranks: int, bound_s: float) -> Stock:
    """One run of the toy job; ended after `bound_s` from the fault, whatever it does then."""
    folder.mkdir(parents=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=10"]
    said = folder / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(
            [*torchrun, str(Path(__file__).resolve()), str(folder), fault, str(rank), str(step)],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        struck_s = _wait_for(folder / "struck", process, limit_s=60.0)
        return _follow(folder, said, process, struck_s, bound_s=bound_s)
    finally:
        _end(process, folder)


def _follow(folder: Path, said: Path, process: subprocess.Popen[bytes], struck_s: float, *, bound_s: float) -> Stock:
    detected_s, culprit, again_s = None, None, None
    while time.monotonic() < struck_s + bound_s and again_s is None:
        if detected_s is None and (failed := _FAILED.search(said.read_text(errors="replace"))) is not None:
            detected_s, culprit = time.monotonic() - struck_s, int(failed[1])
        done = folder / "again"
        again_s = float(done.read_text() or "nan") - struck_s if done.exists() else None
        if process.poll() is not None:
            break
        time.sleep(0.02)
    return Stock(detected_s, culprit, again_s)


def _wait_for(path: Path, process: subprocess.Popen[bytes], *, limit_s: float) -> float:
    give_up_s = time.monotonic() + limit_s
    while not path.exists():
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise RuntimeError(f"the toy job never came to its fault: {(path.parent / 'said').read_text()[-2000:]}")
        time.sleep(0.02)
    return float(path.read_text())


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """torchrun, and every worker that it started: stopped ones do not end with it, and it waits half a minute for them."""
    for path in folder.glob("pid-*"):
        pid = int(path.name.removeprefix("pid-"))
        try:
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue
    process.kill()
    process.wait(_END_LIMIT_S)


def main() -> None:
    import torch
    import torch.distributed as dist

    folder, fault, struck_rank, struck_step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    (folder / f"pid-{os.getpid()}").touch()
    dist.init_process_group("gloo")
    rank, is_first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(100_000):
        if is_first and (rank, step) == (struck_rank, struck_step):
            _write(folder / "struck", time.monotonic())
            _strike(fault)
        dist.all_reduce(torch.ones(1000))
        time.sleep(STEP_S)
        if not is_first and rank == 0 and step == 0:
            _write(folder / "again", time.monotonic())
        if not is_first and step == NUM_STEPS_AFTER:
            break
    dist.destroy_process_group()


def _write(path: Path, value: float) -> None:
    part = path.with_suffix(".part")
    part.write_text(repr(value))
    part.rename(path)


def _strike(fault: str) -> None:
    import torch
    import torch.distributed as dist

    if fault == "mismatched-collective":
        dist.all_gather([torch.zeros(7) for _ in range(dist.get_world_size())], torch.zeros(7))
    elif fault == "hung-rank":
        while True:
            pass
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill-a-rank" else signal.SIGSTOP)


if __name__ == "__main__":
    main()
