"""What do checkpoints cost? Saves and loads of a 124M model and its AdamW state against bare copies and stock DCP, in interleaved rounds.

    python benchmarks/checkpoint.py [--rounds 5] [--quick] [--only copies] [--only saves] [--only steps] [--only loads]

copies  one thread over memory: memcpy, xxh3, the digest by dtype, all of them over pieces as a save takes them
saves   how long the loop stands still, with and without overlap, and the CPU-seconds of the whole save against dcp.save(sync_files=True)
steps   real forward and backward steps while a save is staged and uploaded by another process, against the same steps without one
loads   a verified load against stock dcp.load, and from memory against a cold disk

Prints one JSON line per round and row, then a table of medians and spreads, and each target as met or not met. Exit 1 when one is not met.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.checkpoint.commit import prepare
from surefoot.checkpoint.readback import drop_cached
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.save_plan import SavePlans
from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.checkpoint.sources import SlotSource
from surefoot.checkpoint.staging import Snapshot, bytes_of
from surefoot.checkpoint.state import LiveState, collect
from surefoot.checkpoint.upload import Uploader
from surefoot.config.presets import PRESETS
from surefoot.core.records import Manifest
from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model, materialise
from surefoot.tensors.digest import BoxDigest, box_digest
from surefoot.tensors.heap import keep_freed_pages
from surefoot.tensors.world import World, single_world

PIECE_BYTES = 1 << 18
LIMIT_S = 600.0
GROUPS = ("copies", "saves", "steps", "loads")


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
    Target("verified load from memory / from a cold disk", 0.2, lambda r: r["load_memory_s"] / r["load_cold_s"], ("load_memory_s",)),
)


@dataclass
class Bench:
    """One state, two host copies and a folder, all used again by every round."""

    work: Path
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    slots: list[Slot] = field(default_factory=list)
    plans: SavePlans = field(default_factory=SavePlans)
    num_saves: int = 0

    @property
    def root(self) -> Path:
        return self.work / "checkpoints"

    @property
    def state(self) -> LiveState:
        return collect(self.model, self.optimizer)

    def forward_backward(self) -> None:
        num_tokens = self.tokens.shape[1]
        positions = torch.arange(num_tokens).expand_as(self.tokens)
        logits = self.model(self.tokens, positions, torch.zeros_like(self.tokens))
        nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()  # type: ignore[no-untyped-call]  # torch's own

    def snapshot(self, *, overlap: bool, slot: Slot) -> Snapshot:
        """What a guard does on the loop's thread when a save is due."""
        self.num_saves += 1
        work = prepare(
            draft(f"s{self.num_saves}-a1"), state=self.state, extras={"cursor": {}}, world=self.world, plans=self.plans, overlap=overlap
        )
        snapshot = Snapshot(slot, work)
        snapshot.begin()
        snapshot.start()
        return snapshot

    def remove_checkpoints(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a state of 7 MB: whether everything runs, no figures worth keeping")
    parser.add_argument("--only", action="append", choices=GROUPS)
    parser.add_argument("--work", type=Path, default=Path("build/checkpoint-bench"))
    parser.add_argument("--upload", type=Path, help=argparse.SUPPRESS)  # the other process of `steps`
    parser.add_argument("--fds", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upload:
        return upload_until_told(options.upload, [int(fd) for fd in options.fds.split(",")])
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # stock DCP, every time
    keep_freed_pages()
    bench = new_bench(options.work, quick=options.quick)
    print(json.dumps({"machine": machine(), "state_bytes": state_bytes(bench), "torch": torch.__version__}), flush=True)
    rounds: list[dict[str, float]] = []
    groups = options.only or GROUPS
    for number in range(options.rounds + 1):
        row: dict[str, float] = {}
        for name in groups:
            row |= MEASURES[name](bench, flip=number % 2 == 1)
        if number:  # the first one touches all memory for the first time
            print(json.dumps({"round": number, **{key: round(value, 5) for key, value in row.items()}}), flush=True)
            rounds.append(row)
    shutil.rmtree(options.work)
    met = report(rounds)
    return 0 if met or options.quick else 1  # quick: a few megabytes say nothing about a target


def new_bench(work: Path, *, quick: bool) -> Bench:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    sizes: dict[str, Any] = dict(PRESETS["tiny" if quick else "124m"])
    model = build_model(ModelSection(**sizes), 8192 if quick else 50304, seed=1)
    materialise(model, seed=1, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for tensor in collect(model, optimizer).tensors.values():  # which makes the moments
        if tensor.is_floating_point() and tensor.dim():
            tensor.normal_(std=0.02)
    tokens = torch.randint(0, 8192, (1, 16 if quick else 64), generator=torch.Generator().manual_seed(0))
    return Bench(work, single_world(), model, optimizer, tokens, [Slot.create(rank=0, number=number) for number in range(2)])


def draft(name: str) -> Manifest:
    return Manifest(
        format_version=0, id=name, run="bench", step=1, attempt=1, generation=1, parent=None, time_utc="2026-01-01T00:00:00.000Z",
        loss=1.0, tokens=1, state_digest="", config_hashes={}, data_hash="", code_version="0", topology={}, environment={}, ledger_seq=1,
        ledger_hash="", cursor={}, files=(), tensors=(),
    )  # fmt: skip


def state_bytes(bench: Bench) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in bench.state.tensors.values())


def machine() -> str:
    """The kind of machine, not which one."""
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown CPU")
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{model}, {os.cpu_count()} cores, {memory_gb:.0f} GB, {torch.get_num_threads()} threads in the rank"


# --- copies ---


def measure_copies(bench: Bench, *, flip: bool) -> dict[str, float]:
    """CPU-seconds per GB."""
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
    for name, run in ordered(runs, flip=flip):
        began_s = time.process_time()
        run()
        found[f"{name} s/GB"] = (time.process_time() - began_s) / (len(source) / 1e9)
    return found


# --- saves ---


def measure_saves(bench: Bench, *, flip: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    runs = {
        "memcpy": lambda: memcpy_state(bench),
        "plain": lambda: blocked_plain(bench),
        "overlap": lambda: blocked_overlap(bench),
        "save": lambda: whole_save(bench),
        "dcp": lambda: stock_save(bench),
    }
    for _, run in ordered(runs, flip=flip):
        bench.remove_checkpoints()
        gc.collect()
        found |= run()
    return found


def memcpy_state(bench: Bench) -> dict[str, float]:
    """All bytes of the state into memory that was touched before, with one thread."""
    sources = [values for tensor in bench.state.tensors.values() if (values := bytes_of(tensor)) is not None]
    target = np.frombuffer(claimed(bench), dtype=np.uint8)

    def copy() -> None:
        at = 0
        for source in sources:
            target[at : at + len(source)] = source
            at += len(source)

    copy()
    with timed() as took:
        copy()
    bench.slots[0].reset()
    return {"memcpy_state_s": took.wall_s, "memcpy_state_cpu_s": took.cpu_s}


def claimed(bench: Bench) -> memoryview:
    """The memory of a slot, for a copy that is none of a save."""
    bench.num_saves += 1
    work = prepare(draft(f"s{bench.num_saves}-a1"), state=bench.state, extras={}, world=bench.world, plans=bench.plans)
    return bench.slots[0].claim(work.header)


def blocked_plain(bench: Bench) -> dict[str, float]:
    with timed() as took:
        snapshot = bench.snapshot(overlap=False, slot=bench.slots[0])
    snapshot.join(limit_s=LIMIT_S)
    refuse(snapshot.error)
    bench.slots[0].begin_upload()
    bench.slots[0].reset()
    return {"blocked_plain_s": took.wall_s, "blocked_plain_cpu_s": took.cpu_s}


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


def stock_save(bench: Bench) -> dict[str, float]:
    folder = bench.work / "dcp"
    shutil.rmtree(folder, ignore_errors=True)
    with timed() as took:
        dcp_save(dict(bench.state.tensors), storage_writer=FileSystemWriter(folder, sync_files=True), no_dist=True)
    return {"dcp_save_s": took.wall_s, "dcp_save_cpu_s": took.cpu_s}


# --- steps ---


def measure_steps(bench: Bench, *, flip: bool) -> dict[str, float]:
    """Steps with a save among them that another process uploads and reads back, against as many without."""
    bench.remove_checkpoints()
    fds = [slot.fd for slot in bench.slots]
    command = [sys.executable, __file__, "--upload", str(bench.root), "--fds", ",".join(map(str, fds))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds) as uploader:
        assert uploader.stdout is not None
        assert uploader.stdin is not None
        assert uploader.stdout.readline() == b"ready\n"
        runs: dict[str, Callable[[], Took]] = {"quiet": lambda: steps(bench, save=False), "saving": lambda: steps(bench, save=True)}
        took = {name: run() for name, run in ordered(runs, flip=flip)}
        uploader.stdin.close()
        upload_cpu_s = float(uploader.stdout.readline())
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


def was_read_back(slot: Slot) -> bool:
    header = slot.header()
    return slot.state() is SlotState.COMMITTED and header is not None and header.read_back != ""


def upload_until_told(root: Path, fds: list[int]) -> int:
    """The other process: what an agent's uploader does, without the ledger. Ends with its stdin, and says its CPU-seconds."""
    slots = [Slot.open(fd, rank=0, number=number) for number, fd in enumerate(fds)]
    uploader = Uploader(root, slots, limit_s=LIMIT_S, on_read_back=lambda back: None)
    os.set_blocking(0, False)
    began = resource.getrusage(resource.RUSAGE_SELF)
    print("ready", flush=True)
    while True:
        if uploader.step():
            continue
        try:
            if os.read(0, 1) == b"":
                break
        except BlockingIOError:
            time.sleep(0.02)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    print(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime, flush=True)
    return 0


# --- loads ---


def measure_loads(bench: Bench, *, flip: bool) -> dict[str, float]:
    bench.remove_checkpoints()
    whole_save(bench)
    stock_save(bench)
    folder = next(path for path in bench.root.iterdir() if not path.name.startswith("."))
    slots = SlotSource(bench.slots[:1], checkpoint=folder.name)

    def verified(name: str, *, cold: bool, from_memory: bool = False) -> dict[str, float]:
        if cold:
            drop_cached(folder)
        state = collect(bench.model, bench.optimizer, for_load=True)
        with timed() as took:
            loaded = load(folder, state=state, world=bench.world, sources=[slots] if from_memory else [])
        assert set(loaded.sources.values()) == {"memory" if from_memory else "disk"}, loaded.sources
        return {f"{name}_s": took.wall_s, f"{name}_cpu_s": took.cpu_s}

    def stock(name: str, *, cold: bool) -> dict[str, float]:
        if cold:
            drop_cached(bench.work / "dcp")
        tensors = dict(bench.state.tensors)
        with timed() as took:
            dcp_load(tensors, storage_reader=FileSystemReader(bench.work / "dcp"), no_dist=True)
        return {f"{name}_s": took.wall_s, f"{name}_cpu_s": took.cpu_s}

    runs = {
        "stock_cold": lambda: stock("dcp_load_cold", cold=True),
        "cold": lambda: verified("load_cold", cold=True),
        "memory": lambda: verified("load_memory", cold=True, from_memory=True),
        "stock_warm": lambda: stock("dcp_load_warm", cold=False),
        "fill_cache": lambda: verified("unused", cold=False),
        "warm": lambda: verified("load_warm", cold=False),
    }
    found: dict[str, float] = {}
    for _, run in ordered({name: runs[name] for name in ("stock_cold", "cold", "memory")}, flip=flip):
        found |= run()
    runs["fill_cache"]()
    stock("unused", cold=False)
    for _, run in ordered({name: runs[name] for name in ("stock_warm", "warm")}, flip=flip):
        found |= run()
    return found


# --- measuring and telling ---


@dataclass
class Took:
    """Wall and CPU-seconds of this process, all threads."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def timed() -> Iterator[Took]:
    took = Took()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield took
    took.wall_s, took.cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s


def ordered(runs: dict[str, Callable[[], Any]], *, flip: bool) -> list[tuple[str, Callable[[], Any]]]:
    """Who goes first alternates, so that a machine that slows down or speeds up favours nobody."""
    return list(reversed(runs.items())) if flip else list(runs.items())


def refuse(error: Exception | None) -> None:
    if error is not None:
        raise error


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
}


if __name__ == "__main__":
    sys.exit(main())
