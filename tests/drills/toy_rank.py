"""A torch-free training job for drills of the agent: it counts steps, remembers them in a file, leaves when asked, and fails on order.

`TOY` in the environment is JSON: {num_steps, step_s, warm_s, faults: {"<generation>": {"<rank>": "<fault>"}}}. Faults: `exit:<code>`,
`complain:<code>` (with an error file), `raise`, `segfault`, `stuck` (before the first step), `deaf` (does not leave), `slow-start`, `loud`,
`worker` (starts a process that ends only when it is killed, and writes its pid to `worker_<rank>`), `endless` (done, but never ends).
With `slots` true it adds a byte to each slot that it was handed, and says how large they are and how many descriptors it has.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from surefoot.coordinate.beats import BeatBoard
from surefoot.core.records import Phase
from surefoot.launch.logs import rank_paths

TOY = json.loads(os.environ["TOY"])


def main() -> int:
    rank, generation = int(os.environ["RANK"]), int(os.environ["SUREFOOT_GENERATION"])
    run_dir = Path(os.environ["SUREFOOT_RUN_DIR"])
    fault = TOY.get("faults", {}).get(str(generation), {}).get(str(rank), "")
    board = BeatBoard.attach(int(os.environ["SUREFOOT_BEATS_FD"]))
    slot = board.slot(rank)
    slot.beat(phase=Phase.RESTORE)
    if fault == "stuck":
        time.sleep(1000)
    if fault == "worker":
        start_worker(run_dir, rank)
    if fault == "slow-start":
        time.sleep(0.5)
    saved = run_dir / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    print(f"generation {generation} goes on from step {step}", flush=True)
    if TOY.get("slots"):
        add_to_slots(run_dir, rank, generation)
    while step < TOY["num_steps"]:
        slot.beat(phase=Phase.STEP, step=step, restored=True)
        if board.leave_requested and fault != "deaf":
            print(f"left after step {step}")
            return 75
        time.sleep(TOY["step_s"])
        step += 1
        if rank == 0:
            part = run_dir / "saved.part"
            part.write_text(str(step))
            part.rename(saved)
        if step % 3 == 0:
            fail(fault, run_dir=run_dir, generation=generation, rank=rank)
    slot.beat(phase=Phase.STOPPED, step=step)
    if fault == "endless":
        time.sleep(1000)
    return 0


def add_to_slots(run_dir: Path, rank: int, generation: int) -> None:
    slots = [(owner, number, int(os.environ[name])) for owner, number, name in json.loads(os.environ["SUREFOOT_SLOTS"])]
    for owner, _, fd in slots:
        if owner == rank:
            os.pwrite(fd, b"x", os.fstat(fd).st_size)
    facts = {
        "own": [[number, os.fstat(fd).st_size] for owner, number, fd in slots if owner == rank],
        "num_slots": len(slots),
        "num_fds": len(os.listdir("/proc/self/fd")),
    }
    (run_dir / f"slots_g{generation}_{rank}.json").write_text(json.dumps(facts))


def start_worker(run_dir: Path, rank: int) -> None:
    """As a data loader does: a child in the rank's process group that knows nothing of the agent."""
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
        os._exit(0)
    part = run_dir / f"worker_{rank}.part"
    part.write_text(str(pid))
    part.rename(run_dir / f"worker_{rank}")


def fail(fault: str, *, run_dir: Path, generation: int, rank: int) -> None:
    kind, _, code = fault.partition(":")
    if kind == "exit":
        sys.exit(int(code))
    if kind == "complain":
        error = {"code": "data", "what": f"code {code}, says rank {rank}", "where": "the toy", "hint": "mend the toy"}
        rank_paths(run_dir, generation, rank)[2].write_text(json.dumps({"error": error}))
        sys.exit(int(code))
    if kind == "raise":
        raise ValueError("the toy is broken")
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "loud":
        print("x" * 100_000)
