"""Loads of benchmarks/checkpoint.py: each in a process of its own, into live tensors whose memory was touched before, as after a start.

In one process the order would decide: `dcp.load` makes a fresh copy of every part, which is dear in a young process and cheap in one that
kept the memory of the loads before. So each process loads twice, and both are told: `again` is a rollback within a long life. Both sides
find the same page cache: both folders in it, or, cold, the free pages that both left. A page that its host has yet to give costs a virtual
machine more than the read.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from benchmarks.checkpoint_common import Bench, Took, fill_touched, new_model, new_optimizer, ordered, timed
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from surefoot.checkpoint.readback import drop_cached
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.sources import SlotSource
from surefoot.checkpoint.state import LiveState, collect
from surefoot.tensors.heap import keep_freed_pages
from surefoot.tensors.world import single_world

HOWS = ("verified", "memory", "dcp")


def measure(bench: Bench, *, folder: Path, quick: bool, flip: bool) -> dict[str, float]:
    """The checkpoint `folder` is held by the first slot; a stock one of the same state lies in `dcp` beside it."""

    stored = bench.work / "dcp"

    def one(name: str, how: str, *, cold: bool) -> dict[str, float]:
        mine, other = (stored, folder) if how == "dcp" else (folder, stored)
        first, *again = in_own_process(how, mine, other=other, slot=bench.slots[0], cold=cold, quick=quick)
        found = {f"{name}_s": first.wall_s, f"{name}_cpu_s": first.cpu_s}
        for took in again:
            found |= {f"{name}_again_s": took.wall_s, f"{name}_again_cpu_s": took.cpu_s}
        return found

    runs = {
        "dcp_cold": lambda: one("dcp_load_cold", "dcp", cold=True),
        "cold": lambda: one("load_cold", "verified", cold=True),
        "memory": lambda: one("load_memory", "memory", cold=True),
        "dcp_warm": lambda: one("dcp_load_warm", "dcp", cold=False),
        "warm": lambda: one("load_warm", "verified", cold=False),
    }
    found: dict[str, float] = {}
    for _, run in ordered(runs, flip=flip):
        found |= run()
    return found


def in_own_process(how: str, folder: Path, *, other: Path, slot: Slot, cold: bool, quick: bool) -> list[Took]:
    """The first load of the process, and when it is warm a second one."""
    command = [sys.executable, "-m", "benchmarks.checkpoint_loads", how, str(folder), str(other), "--slot", str(slot.fd)]
    command += ["--cold"] * cold + ["--quick"] * quick
    told = subprocess.run(command, stdout=subprocess.PIPE, pass_fds=[slot.fd], check=True).stdout
    return [Took(**took) for took in json.loads(told)]


def main() -> None:
    parser = argparse.ArgumentParser(description="one process of benchmarks/checkpoint.py")
    parser.add_argument("how", choices=HOWS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # stock DCP, every time
    keep_freed_pages()
    model = new_model(quick=options.quick).to_empty(device="cpu")
    optimizer = new_optimizer(model)
    slots = [Slot.open(options.slot, rank=0, number=0)] if options.how == "memory" else []
    took = []
    for _ in range(1 if options.cold else 2):
        state = collect(model, optimizer, for_load=True)
        fill_touched(state)
        gc.collect()
        for folder in (options.other, options.folder):
            fill_cache(folder)
        for folder in (options.other, options.folder) if options.cold else ():
            drop_cached(folder)
        with timed() as one:
            load_once(options.how, options.folder, state=state, slots=slots)
        took.append(asdict(one))
    print(json.dumps(took))


def load_once(how: str, folder: Path, *, state: LiveState, slots: list[Slot]) -> None:
    if how == "dcp":
        dcp_load(dict(state.tensors), storage_reader=FileSystemReader(folder), no_dist=True)
        return
    sources = [SlotSource(slots, checkpoint=folder.name)] if how == "memory" else []
    loaded = load(folder, state=state, world=single_world(), sources=sources)
    assert set(loaded.sources.values()) == {"memory" if how == "memory" else "disk"}, loaded.sources


def fill_cache(folder: Path) -> None:
    """Let the page cache have every file; through a small buffer, which leaves the heap as it is."""
    buffer = bytearray(1 << 20)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                continue


if __name__ == "__main__":
    main()
