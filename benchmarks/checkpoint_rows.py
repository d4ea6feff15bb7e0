"""The rows of benchmarks/checkpoint.py, which says what they are and starts this."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash
from benchmarks import checkpoint_loads, checkpoint_ranks
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
from benchmarks.checkpoint_uploader import uploading, was_read_back

from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.checkpoint.staging import bytes_of
from surefoot.checkpoint.upload import Uploader
from surefoot.tensors.digest import BoxDigest, box_digest
from surefoot.tensors.heap import keep_freed_pages
from surefoot.tensors.world import single_world

PIECE_BYTES = 1 << 18
GROUPS = ("copies", "saves", "steps", "loads", "two-ranks")


@dataclass(frozen=True)
class Target:
    """`value` of a round, from its rows; met when the median is at most `most`. Without `most` it is only told."""

    name: str
    most: float | None
    value: Callable[[dict[str, float]], float]
    needs: tuple[str, ...]


TARGETS = (
    Target("blocked without overlap / one warm memcpy", 1.2, lambda r: r["blocked_plain_s"] / r["memcpy_state_s"], ("blocked_plain_s",)),
    Target("blocked with overlap / one warm memcpy", 0.25, lambda r: r["blocked_overlap_s"] / r["memcpy_state_s"], ("blocked_overlap_s",)),
    Target("CPU of a save / dcp.save(sync_files=True)", 1.2, lambda r: r["save_cpu_s"] / r["dcp_save_cpu_s"], ("save_cpu_s",)),
    Target(
        "CPU of a save and its read-back / dcp.save", None, lambda r: r["proven_save_cpu_s"] / r["dcp_save_cpu_s"], ("proven_save_cpu_s",)
    ),
    Target(
        "extra wall of steps / (CPU-seconds of the save / cores)", 1.3, lambda r: r["extra_wall_s"] / r["fair_share_s"], ("extra_wall_s",)
    ),
    Target("verified load, warm / dcp.load, warm", 1.3, lambda r: r["load_warm_s"] / r["dcp_load_warm_s"], ("load_warm_s",)),
    Target("verified load, cold / dcp.load, cold", 1.3, lambda r: r["load_cold_s"] / r["dcp_load_cold_s"], ("load_cold_s",)),
    Target("CPU of a verified load / of dcp.load, warm", None, lambda r: r["load_warm_cpu_s"] / r["dcp_load_warm_cpu_s"], ("load_warm_s",)),
    Target("CPU of a verified load / of dcp.load, cold", None, lambda r: r["load_cold_cpu_s"] / r["dcp_load_cold_cpu_s"], ("load_cold_s",)),
    Target("the second of a process, warm", None, lambda r: r["load_warm_again_s"] / r["dcp_load_warm_again_s"], ("load_warm_s",)),
    Target(
        "CPU of the second of a process, warm",
        None,
        lambda r: r["load_warm_again_cpu_s"] / r["dcp_load_warm_again_cpu_s"],
        ("load_warm_s",),
    ),
    Target("verified load from memory / from a cold disk", 0.2, lambda r: r["load_memory_s"] / r["load_cold_s"], ("load_memory_s",)),
    Target(
        "2 ranks: blocked without overlap / one warm memcpy", 1.2, lambda r: r["2r_blocked_plain_s"] / r["2r_memcpy_s"], ("2r_dcp_save_s",)
    ),
    Target(
        "2 ranks: blocked with overlap / one warm memcpy", 0.25, lambda r: r["2r_blocked_overlap_s"] / r["2r_memcpy_s"], ("2r_dcp_save_s",)
    ),
    Target("2 ranks: blocked with overlap / dcp.save", None, lambda r: r["2r_blocked_overlap_s"] / r["2r_dcp_save_s"], ("2r_dcp_save_s",)),
    Target(
        "2 ranks: CPU of a save / dcp.save(sync_files=True)", 1.2, lambda r: r["2r_save_cpu_s"] / r["2r_dcp_save_cpu_s"], ("2r_dcp_save_s",)
    ),
    Target(
        "2 ranks: extra wall of steps / (CPU-seconds of the save / cores)",
        1.3,
        lambda r: r["2r_extra_wall_s"] / r["2r_fair_share_s"],
        ("2r_dcp_save_s",),
    ),
)


@dataclass(frozen=True)
class Run:
    bench: Bench
    ranks: checkpoint_ranks.Ranks | None
    quick: bool


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/checkpoint.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a state of 7 MB: whether everything runs, no figures worth keeping")
    parser.add_argument("--only", action="append", choices=GROUPS)
    parser.add_argument("--work", type=Path, default=Path("build/checkpoint-bench"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # stock DCP, every time
    keep_freed_pages()
    groups = options.only or GROUPS
    with ExitStack() as stack:
        run = new_run(options.work, quick=options.quick, with_ranks="two-ranks" in groups, stack=stack)
        print(json.dumps({"machine": machine(), "state_bytes": state_bytes(run.bench), "torch": torch.__version__}), flush=True)
        rounds: list[dict[str, float]] = []
        for number in range(options.rounds + 1):
            row: dict[str, float] = {}
            for name in groups:
                row |= MEASURES[name](run, flip=number % 2 == 1)
            if number:  # the first one touches all memory for the first time
                print(json.dumps({"round": number, **{key: round(value, 5) for key, value in row.items()}}), flush=True)
                rounds.append(row)
    shutil.rmtree(options.work)
    met = report(rounds)
    return 0 if met or options.quick else 1  # quick: a few megabytes say nothing about a target


def new_run(work: Path, *, quick: bool, with_ranks: bool, stack: ExitStack) -> Run:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = new_model(quick=quick).to_empty(device="cpu")
    slots = [Slot.create(rank=0, number=number) for number in range(2)]
    bench = Bench(work, single_world(), model, new_optimizer(model), new_tokens(quick=quick), slots)
    fill(bench.state)
    ranks = stack.enter_context(checkpoint_ranks.two_ranks(work / "ranks", quick=quick)) if with_ranks else None
    return Run(bench, ranks, quick)


def state_bytes(bench: Bench) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in bench.state.tensors.values())


def machine() -> str:
    """The kind of machine, not which one."""
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown CPU")
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{model}, {os.cpu_count()} cores, {memory_gb:.0f} GB, {torch.get_num_threads()} threads in the rank"


# --- copies ---


def measure_copies(run: Run, *, flip: bool) -> dict[str, float]:
    """CPU-seconds per GB."""
    bench = run.bench
    source = next(values for tensor in bench.state.tensors.values() if (values := bytes_of(tensor)) is not None and len(values) > 1 << 20)
    target = np.empty_like(source)
    target[:] = source
    pieces = [slice(start, start + PIECE_BYTES) for start in range(0, len(source), PIECE_BYTES)]

    def memcpy() -> None:
        for piece in pieces:
            target[piece] = source[piece]

    def xxh3() -> None:
        checksum = xxhash.xxh3_128()
        for piece in pieces:
            checksum.update(source[piece].data)

    def copied_and_proven() -> None:
        """As staging does it: hash of the live part; copy, digest and hash of each piece while it is in the cache."""
        xxhash.xxh3_128_hexdigest(source.data)
        shape = (len(source) // 4,)
        digest, checksum = BoxDigest(shape, dtype=torch.float32, global_shape=shape, offsets=(0,)), xxhash.xxh3_128()
        for piece in pieces:
            target[piece] = source[piece]
            digest.update(target[piece])
            checksum.update(target[piece].data)

    runs: dict[str, Callable[[], object]] = {"memcpy": memcpy, "xxh3": xxh3, "copied_and_proven": copied_and_proven}
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        whole = torch.from_numpy(source).view(dtype)
        rows = whole[: len(whole) // 768 * 768].view(-1, 768)
        runs[f"sf1 {dtype}"] = partial(box_digest, whole, global_shape=whole.shape, offsets=(0,))
        runs[f"sf1 {dtype} half of each row"] = partial(box_digest, rows, global_shape=(len(rows), 1536), offsets=(0, 768))
    small = torch.split(torch.from_numpy(source).view(torch.float32), 16 << 10)
    runs["sf1 torch.float32 in tensors of 64 KiB"] = lambda: [box_digest(one, global_shape=one.shape, offsets=(0,)) for one in small]
    found = {}
    for name, work in ordered(runs, flip=flip):
        began_s = time.process_time()
        work()
        found[f"{name} s/GB"] = (time.process_time() - began_s) / (len(source) / 1e9)
    return found


# --- saves ---


def measure_saves(run: Run, *, flip: bool) -> dict[str, float]:
    bench = run.bench
    found: dict[str, float] = {}
    runs = {
        "memcpy": lambda: told("memcpy_state", memcpy_state(bench, bench.slots[0])),
        "plain": lambda: blocked_plain(bench),
        "overlap": lambda: blocked_overlap(bench),
        "save": lambda: whole_save(bench),
        "dcp": lambda: told("dcp_save", stock_save(bench)),
    }
    for _, work in ordered(runs, flip=flip):
        bench.remove_checkpoints()
        gc.collect()
        found |= work()
    return found


def told(name: str, took: Took) -> dict[str, float]:
    return {f"{name}_s": took.wall_s, f"{name}_cpu_s": took.cpu_s}


def blocked_plain(bench: Bench) -> dict[str, float]:
    with timed() as took:
        snapshot = bench.snapshot(overlap=False, slot=bench.slots[0])
    snapshot.join(limit_s=LIMIT_S)
    refuse(snapshot.error)
    bench.slots[0].begin_upload()
    bench.slots[0].reset()
    return told("blocked_plain", took)


def blocked_overlap(bench: Bench) -> dict[str, float]:
    """The call at the end of the step, and what is left to wait before the next update."""
    with timed() as call:
        snapshot = bench.snapshot(overlap=True, slot=bench.slots[0])
    bench.forward_backward()
    with timed() as wait:
        snapshot.wait(limit_s=LIMIT_S)
    snapshot.join(limit_s=LIMIT_S)
    refuse(snapshot.error)
    bench.model.zero_grad(set_to_none=True)
    bench.slots[0].begin_upload()
    bench.slots[0].reset()
    return {"blocked_overlap_s": call.wall_s + wait.wall_s, "blocked_overlap_call_s": call.wall_s, "blocked_overlap_wait_s": wait.wall_s}


def whole_save(bench: Bench) -> dict[str, float]:
    """From the live state to the rename, without anything beside it; then the read-back."""
    problems: list[object] = []
    uploader = Uploader(bench.root, bench.slots[:1], limit_s=LIMIT_S, on_read_back=lambda back: problems.extend(back.problems))
    with timed() as took:
        snapshot = bench.snapshot(overlap=True, slot=bench.slots[0])
        snapshot.join(limit_s=LIMIT_S)
        while bench.slots[0].state() not in (SlotState.COMMITTED, SlotState.FAILED):
            uploader.step()
    with timed() as back:
        while uploader.busy:
            uploader.step()
    assert bench.slots[0].state() is SlotState.COMMITTED, bench.slots[0].header()
    assert problems == []
    return {
        "save_s": took.wall_s,
        "save_cpu_s": took.cpu_s,
        "read_back_s": back.wall_s,
        "read_back_cpu_s": back.cpu_s,
        "proven_save_cpu_s": took.cpu_s + back.cpu_s,
    }


# --- steps ---


def measure_steps(run: Run, *, flip: bool) -> dict[str, float]:
    """Steps with a save among them that another process uploads and reads back, against as many without."""
    bench = run.bench
    bench.remove_checkpoints()
    with uploading(bench.root, bench.slots[1:]) as uploader:
        runs: dict[str, Callable[[], Took]] = {"quiet": lambda: steps(bench, save=False), "saving": lambda: steps(bench, save=True)}
        took = {name: work() for name, work in ordered(runs, flip=flip)}
        upload_cpu_s = uploader.cpu_s()
    with timed() as staging:  # what it takes by itself: beside the steps, threads that wait for each other burn more than the save needs
        snapshot = bench.snapshot(overlap=True, slot=bench.slots[0])
        snapshot.join(limit_s=LIMIT_S)
    refuse(snapshot.error)
    bench.slots[0].begin_upload()
    bench.slots[0].reset()
    return {
        "quiet_steps_s": took["quiet"].wall_s,
        "saving_steps_s": took["saving"].wall_s,
        "extra_wall_s": took["saving"].wall_s - took["quiet"].wall_s,
        "extra_cpu_s": took["saving"].cpu_s - took["quiet"].cpu_s + upload_cpu_s,
        "staging_cpu_s": staging.cpu_s,
        "upload_cpu_s": upload_cpu_s,
        "fair_share_s": (staging.cpu_s + upload_cpu_s) / (os.cpu_count() or 1),
    }


def steps(bench: Bench, *, save: bool, number: int = 6) -> Took:
    """The same work each time: forward, backward, the wait for a staging that is under way, update. Until the save is read back."""
    snapshot = None
    with timed() as took:
        for index in range(number):
            bench.forward_backward()
            if snapshot is not None:
                snapshot.wait(limit_s=LIMIT_S)
                refuse(snapshot.error)
                snapshot = None
            bench.optimizer.step()
            bench.optimizer.zero_grad()
            if save and index == 0:
                snapshot = bench.snapshot(overlap=True, slot=bench.slots[1])
    deadline_s = time.monotonic() + LIMIT_S
    while save and not was_read_back(bench.slots[1]):
        assert time.monotonic() < deadline_s, "the uploader did not read the save back"
        time.sleep(0.01)
    return took


# --- loads and ranks ---


def measure_loads(run: Run, *, flip: bool) -> dict[str, float]:
    bench = run.bench
    bench.remove_checkpoints()
    whole_save(bench)
    stock_save(bench)
    folder = next(path for path in bench.root.iterdir() if not path.name.startswith("."))
    return checkpoint_loads.measure(bench, folder=folder, quick=run.quick, flip=flip)


def measure_two_ranks(run: Run, *, flip: bool) -> dict[str, float]:
    assert run.ranks is not None
    return checkpoint_ranks.measure(run.ranks, flip=flip)


# --- telling ---


def report(rounds: list[dict[str, float]]) -> bool:
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rounds:
        for key, value in row.items():
            columns[key].append(value)
    width = max(map(len, columns))
    print(f"\n{'':{width}}   median      min      max")
    for key, values in columns.items():
        print(f"{key:{width}} {statistics.median(values):8.3f} {min(values):8.3f} {max(values):8.3f}")
    print()
    all_met = True
    for target in TARGETS:
        if not all(name in columns for name in target.needs):
            continue
        values = [target.value(row) for row in rounds]
        median = statistics.median(values)
        verdict = "no target"
        if target.most is not None:
            all_met = all_met and median <= target.most
            verdict = f"at most {target.most}: {'met' if median <= target.most else 'NOT MET'}"
        print(f"{target.name}: {median:.3f} ({min(values):.3f} to {max(values):.3f}), {verdict}")
    return all_met


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    "copies": measure_copies,
    "saves": measure_saves,
    "steps": measure_steps,
    "loads": measure_loads,
    "two-ranks": measure_two_ranks,
}


if __name__ == "__main__":
    sys.exit(main())
