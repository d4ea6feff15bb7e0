"""The two ranks of benchmarks/checkpoint.py: fully sharded processes over gloo, one thread each; a process of its own uploads for both.

The parent owns the slots and the uploader and says what comes next; each rank does it behind a barrier and answers with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.checkpoint_common import (
    LIMIT_S,
    Bench,
    Took,
    fill,
    memcpy_state,
    new_model,
    new_optimizer,
    new_tokens,
    ordered,
    refuse,
    stock_save,
    timed,
)
from benchmarks.checkpoint_uploader import OtherProcess, uploading, was_committed, was_read_back
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from surefoot.checkpoint.slot import Slot
from surefoot.model.build import shard_units
from surefoot.tensors.heap import keep_freed_pages
from surefoot.tensors.world import join_world

NUM_RANKS = 2
NUM_STEPS = 6


@dataclass
class Ranks:
    work: Path
    processes: list[subprocess.Popen[str]]
    slots: list[Slot]
    uploader: OtherProcess

    def do(self, what: str) -> Took:
        """Wall of the slowest rank, CPU-seconds of all."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
        found = []
        for process in self.processes:
            assert process.stdout is not None
            found.append(Took(**json.loads(process.stdout.readline())))
        return Took(max(took.wall_s for took in found), sum(took.cpu_s for took in found))

    def wait_committed(self) -> float:
        """The uploader's CPU-seconds then."""
        return self._wait(lambda: all(was_committed(slot) for slot in self.slots))

    def wait_read_back(self) -> float:
        """As above; the slot of rank 0 says it for all."""
        return self._wait(lambda: was_read_back(self.slots[0]))

    def _wait(self, seen: Callable[[], bool]) -> float:
        deadline_s = time.monotonic() + LIMIT_S
        while not seen():
            assert time.monotonic() < deadline_s, [slot.header() for slot in self.slots]
            time.sleep(0.01)
        return self.uploader.cpu_s()


@contextmanager
def two_ranks(work: Path, *, quick: bool) -> Iterator[Ranks]:
    work.mkdir(parents=True)
    slots = [Slot.create(rank=rank, number=0) for rank in range(NUM_RANKS)]
    processes: list[subprocess.Popen[str]] = []
    with uploading(work / "checkpoints", slots) as uploader:
        try:
            for slot in slots:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.checkpoint_ranks",
                    str(work),
                    str(slot.rank),
                    str(slot.fd),
                    *["--quick"] * quick,
                ]
                pipe = subprocess.PIPE
                processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[slot.fd]))
            yield Ranks(work, processes, slots, uploader)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def measure(ranks: Ranks, *, flip: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    runs = {
        "memcpy": lambda: told("memcpy", ranks.do("memcpy")),
        "steps": lambda: quiet_and_saving(ranks, flip=flip),
        "plain": lambda: blocked_plain(ranks),
        "save": lambda: whole_save(ranks),
        "dcp": lambda: told("dcp_save", ranks.do("dcp")),
    }
    for _, run in ordered(runs, flip=flip):
        for folder in ("checkpoints", "dcp"):
            shutil.rmtree(ranks.work / folder, ignore_errors=True)
        found |= run()
    extra_wall_s = found["2r_saving_steps_s"] - found["2r_quiet_steps_s"]
    return found | {"2r_extra_wall_s": extra_wall_s, "2r_fair_share_s": found["2r_proven_save_cpu_s"] / (os.cpu_count() or 1)}


def told(name: str, took: Took) -> dict[str, float]:
    return {f"2r_{name}_s": took.wall_s, f"2r_{name}_cpu_s": took.cpu_s}


def quiet_and_saving(ranks: Ranks, *, flip: bool) -> dict[str, float]:
    def saving() -> dict[str, float]:
        before_s = ranks.uploader.cpu_s()
        took = ranks.do("saving")
        upload_cpu_s = ranks.wait_read_back() - before_s
        return told("saving_steps", took) | {"2r_blocked_overlap_s": ranks.do("blocked").wall_s, "2r_upload_beside_cpu_s": upload_cpu_s}

    found: dict[str, float] = {}
    runs: dict[str, Callable[[], dict[str, float]]] = {"quiet": lambda: told("quiet_steps", ranks.do("quiet")), "saving": saving}
    for _, run in ordered(runs, flip=flip):
        found |= run()
    return found


def blocked_plain(ranks: Ranks) -> dict[str, float]:
    took = ranks.do("plain")
    ranks.wait_read_back()
    return told("blocked_plain", took)


def whole_save(ranks: Ranks) -> dict[str, float]:
    """Without anything beside it: staging, upload, and the read-back."""
    before_s = ranks.uploader.cpu_s()
    took = ranks.do("stage")
    committed_s = ranks.wait_committed() - before_s
    read_back_s = ranks.wait_read_back() - before_s
    return {"2r_save_cpu_s": took.cpu_s + committed_s, "2r_proven_save_cpu_s": took.cpu_s + read_back_s}


# --- a rank ---


def main() -> None:
    parser = argparse.ArgumentParser(description="one rank of benchmarks/checkpoint.py")
    parser.add_argument("work", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("fd", type=int)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_pages()
    store = dist.FileStore(str(options.work / "store"), NUM_RANKS)  # type: ignore[attr-defined]  # torch re-exports its C part
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=NUM_RANKS, timeout=timedelta(seconds=LIMIT_S))
    bench = new_bench(options.work, quick=options.quick, slot=Slot.open(options.fd, rank=options.rank, number=0))
    blocked = Took()
    for line in sys.stdin:
        dist.barrier()
        if line == "saving\n":
            took, blocked = saving_steps(bench)
        elif line == "blocked\n":
            took = blocked
        else:
            took = DOES[line.strip()](bench)
        print(json.dumps(asdict(took)), flush=True)
    os._exit(0)  # torch 2.13 may deadlock while it takes a gloo group apart


def new_bench(work: Path, *, quick: bool, slot: Slot) -> Bench:
    model = new_model(quick=quick)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for unit in shard_units(model).values():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    world = join_world(device=torch.device("cpu"), collective_limit_s=LIMIT_S)
    bench = Bench(work, world, model, new_optimizer(model), new_tokens(quick=quick), [slot])
    fill(bench.state)
    return bench


def quiet_steps(bench: Bench) -> Took:
    with timed() as took:
        for _ in range(NUM_STEPS):
            bench.forward_backward()
            update(bench)
    return took


def saving_steps(bench: Bench) -> tuple[Took, Took]:
    """The same work with a save behind the first step; and how long the loop stood still for it."""
    with timed() as took:
        bench.forward_backward()
        update(bench)
        with timed() as call:
            snapshot = bench.snapshot(overlap=True, slot=bench.slots[0])
        bench.forward_backward()
        with timed() as wait:
            snapshot.wait(limit_s=LIMIT_S)
        refuse(snapshot.error)
        update(bench)
        for _ in range(NUM_STEPS - 2):
            bench.forward_backward()
            update(bench)
    return took, Took(call.wall_s + wait.wall_s, 0.0)


def update(bench: Bench) -> None:
    bench.optimizer.step()
    bench.optimizer.zero_grad()


def plain(bench: Bench) -> Took:
    with timed() as took:
        snapshot = bench.snapshot(overlap=False, slot=bench.slots[0])
    snapshot.join(limit_s=LIMIT_S)
    refuse(snapshot.error)
    return took


def stage(bench: Bench) -> Took:
    with timed() as took:
        snapshot = bench.snapshot(overlap=True, slot=bench.slots[0])
        snapshot.join(limit_s=LIMIT_S)
    refuse(snapshot.error)
    return took


DOES: dict[str, Callable[[Bench], Took]] = {
    "quiet": quiet_steps,
    "plain": plain,
    "stage": stage,
    "memcpy": lambda bench: memcpy_state(bench, bench.slots[0]),
    "dcp": stock_save,
}


if __name__ == "__main__":
    main()
