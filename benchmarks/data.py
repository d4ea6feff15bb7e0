"""How fast are batches? The loader with checksums on against slices of a plain np.memmap in the same order, and beside other loaders.

    python -m benchmarks.data [--rounds 5] [--only GROUP] [--work build/data]

Sides of a group run in interleaved rounds, who goes first rotating, a process each, over the same samples. *Cold* is 10,000,000 samples of
2,048 tokens in a random order over 41 GB: the page cache is asked to forget the shards before each side, as it must forget them in a run
whose data is larger than memory. Shards are holes, which the kernel fills with zeros, so no disk is measured. *Warm* is 512 MB of random
tokens with documents that stay in the page cache. *Disk* are the same 512 MB, forgotten before each side: rows come from the device, which
has caches of its own. torchdata and mosaicml-streaming are beside when they import.

`memmap` is the map as numpy opens it. `memmap-random` told the kernel that reads are random: without that a fault reads as far ahead as
the disk is set to. Both make tokens and labels. `memmap-packed` makes what a batch of ours has: positions and documents too.

Prints a JSON line per side and round and a summary of medians and spreads; exit 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.data_folders import EOS, SOURCE, VOCAB_SIZE, sparse_folder

SEQ_LEN = 2048
BATCH = 32
NUM_SAMPLES = 10_000_000
SHARD_TOKENS = 1 << 29  # 1 GiB
LEAST_RATIO, MOST_SEEK_MS, MOST_MB = 0.8, 50.0, 100.0
WARM_STEPS = 20
OURS = "surefoot"
COMPARED = ("memmap", "memmap-random", "memmap-packed")
SIDES = {
    "cold": (*COMPARED, OURS, "surefoot-no-thread", "torchdata", "streaming"),
    "warm": (*COMPARED[1:], OURS, "surefoot-no-thread"),
    "disk": (*COMPARED[1:], OURS, "surefoot-no-thread"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--limit-s", type=float, default=5.0, help="a side that is slower measures fewer steps")
    parser.add_argument("--only", choices=SIDES, action="append")
    parser.add_argument("--work", type=Path, default=Path("build/data"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(_measure(options.side, options.work, steps=options.steps, limit_s=options.limit_s)))
        return 0
    met = [_run_group(group, options) for group in options.only or SIDES]
    return 0 if all(met) else 1


def _run_group(group: str, options: argparse.Namespace) -> bool:
    folder = options.work / ("cold" if group == "cold" else "warm")
    (_make_cold if group == "cold" else _make_warm)(folder)
    sides = [side for side in SIDES[group] if _can_run(side, folder)]
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for index in range(options.rounds):
        first = index % len(sides)
        for side in sides[first:] + sides[:first]:
            (_read_all if group == "warm" else _forget)(folder)
            row = _child(side, folder, options)
            rows[side].append(row)
            print(json.dumps({"group": group, "side": side, "round": index + 1, **row}), flush=True)
    return _summary(group, rows)


def _child(side: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.data", "--side", side, "--work", str(folder)]
    command += ["--steps", str(options.steps), "--limit-s", str(options.limit_s)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"{side}: {done.stderr[-2000:]}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def _summary(group: str, rows: dict[str, list[dict[str, float]]]) -> bool:
    met = True
    for side, of_side in rows.items():
        told = [f"{key} {_spread([row[key] for row in of_side])}" for key in of_side[0]]
        print(f"{group} {side}: " + ", ".join(told))
    for side in rows:
        ratios = [ours["rows_per_s"] / other["rows_per_s"] for ours, other in zip(rows[OURS], rows[side], strict=True)]
        if side != OURS:
            has_target = group == "cold" and side in COMPARED
            fine = statistics.median(ratios) >= LEAST_RATIO
            word = f", at least {LEAST_RATIO}: {'met' if fine else 'MISSED'}" if has_target else ""
            met = met and (fine or not has_target)
            print(f"{group} surefoot / {side}: {_spread(ratios)}{word}", flush=True)
    for key, most in (("seek_ms", MOST_SEEK_MS), ("above_import_mb", MOST_MB)):
        value = statistics.median(row[key] for row in rows[OURS])
        met = met and value < most
        print(f"{group} surefoot {key}: {value:.1f}, below {most:g}: {'met' if value < most else 'MISSED'}", flush=True)
    return met


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _measure(side: str, folder: Path, *, steps: int, limit_s: float) -> dict[str, float]:
    open_side = _OPENERS[side]
    _import_for(side)
    before_kb, began_s = _rss_kb("VmRSS"), time.perf_counter()
    next_batch, seek = open_side(folder)
    next_batch()
    open_ms = 1e3 * (time.perf_counter() - began_s)
    began_s = time.perf_counter()
    seek()
    seek_ms = 1e3 * (time.perf_counter() - began_s)
    for _ in range(min(WARM_STEPS, steps)):
        next_batch()
    began_s, began_cpu_s, done = time.perf_counter(), time.process_time(), 0
    while done < steps and time.perf_counter() - began_s < limit_s:
        next_batch()
        done += 1
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {
        "rows_per_s": round(done * BATCH / wall_s),
        "cpu_us_per_row": round(1e6 * cpu_s / done / BATCH, 2),
        "open_ms": round(open_ms, 1),
        "seek_ms": round(seek_ms, 2),
        "above_import_mb": round((_rss_kb("VmHWM") - before_kb) / 1024, 1),
    }


def _rss_kb(name: str) -> int:
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)).split()[1])


def _forget(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _read_all(folder: Path) -> None:
    for path in folder.rglob("*.tok"):
        path.read_bytes()


def _make_cold(folder: Path) -> None:
    num_shards = -(-(NUM_SAMPLES * SEQ_LEN + 1) // SHARD_TOKENS)
    sparse_folder(folder, num_shards=num_shards, shard_tokens=SHARD_TOKENS, num_distinct=num_shards)
    (folder / "tokenizer.json").write_text("{}")


def _make_warm(folder: Path) -> None:
    """One shard of random tokens whose documents have 800 tokens on average."""
    from surefoot.core.strict_json import dumps
    from surefoot.data.documents import Document
    from surefoot.data.manifest import MANIFEST_NAME, Manifest, SourceEntry, SplitEntry, TokenizerEntry, stored_dtype
    from surefoot.data.shard_writer import SplitWriter

    if not (folder / MANIFEST_NAME).exists():
        rng = np.random.default_rng(0)
        writer = SplitWriter(folder / SOURCE / "train", dtype=stored_dtype("u16"))
        tokens = rng.integers(EOS + 1, VOCAB_SIZE, size=1 << 20).astype(np.uint16)
        for number in range(256):  # of 1 Mi tokens each: the writer's signatures would take minutes for documents of 800
            document = Document(str(number), SOURCE, "f", number, 0, 1)
            ids = np.roll(tokens, 4099 * number)
            ids[rng.random(ids.size) < 1 / 800] = EOS
            ids[-1] = EOS
            writer.add(document, token_ids=ids, digest=document.sha256)
        splits = {"train": writer.finish(), "heldout": SplitEntry((), 0, 0, 0)}
        source = SourceEntry("0" * 64, 0, 0, 0, splits=splits)
        manifest = Manifest("0", TokenizerEntry("bytes", "0" * 64, EOS, VOCAB_SIZE), "u16", 0.0, {SOURCE: source})
        (folder / MANIFEST_NAME).write_text(dumps(manifest.as_json()))


Opened = tuple[Callable[[], object], Callable[[], object]]


def _loader(folder: Path, *, prefetch_steps: int) -> Any:
    from surefoot.core.sections import DataSection, SourceSection, TrainSection
    from surefoot.data.loader import ShardedLoader

    data = DataSection(seq_len=SEQ_LEN, sources=(SourceSection(name=SOURCE),), prefetch_steps=prefetch_steps)
    train = TrainSection(num_steps=NUM_SAMPLES // BATCH, global_batch_size=BATCH, micro_batch_size=BATCH)
    return ShardedLoader(str(folder), data=data, train=train, seed=1, rank=0, num_ranks=1)


def _open_surefoot(folder: Path, *, prefetch_steps: int = 2) -> Opened:
    loader = _loader(folder, prefetch_steps=prefetch_steps)
    middle = {**loader.cursor_after(loader.num_samples // BATCH // 2)}
    return loader.__next__, lambda: loader.seek(middle)


def _maps(folder: Path, *, random: bool) -> list[np.memmap[Any, np.dtype[Any]]]:
    shards = [np.memmap(path, dtype="<u2", mode="r", offset=4096) for path in sorted((folder / SOURCE / "train").glob("[0-9]*.tok"))]
    for shard in shards if random else ():
        shard._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]  # numpy hands the map out under this name only
    return shards


def _open_memmap(folder: Path, *, random: bool = True, packed: bool = False) -> Opened:
    """What a plain loop does with a map: rows cut out of it, tokens and labels as int64. It is told the order for nothing."""
    import torch

    from surefoot.data.packing import pack_rows

    shards = _maps(folder, random=random)
    batches = _order(folder)

    def next_batch() -> tuple[torch.Tensor, ...]:
        starts = next(batches)
        rows_BT = np.empty((BATCH, SEQ_LEN + 1), dtype=np.int64)
        for row, start in enumerate(starts.tolist()):
            rows_BT[row] = _slice(shards, start)
        parts = pack_rows(rows_BT, eos_id=EOS) if packed else (rows_BT[:, :-1].copy(), rows_BT[:, 1:].copy())
        return tuple(torch.from_numpy(part) for part in parts)

    return next_batch, lambda: None


def _slice(shards: Sequence[npt.NDArray[Any]], start: int) -> npt.NDArray[Any]:
    number, first = divmod(start, len(shards[0]))
    row = shards[number][first : first + SEQ_LEN + 1]
    return row if len(row) > SEQ_LEN else np.concatenate([row, shards[number + 1][: SEQ_LEN + 1 - len(row)]])


def _order(folder: Path) -> Iterator[npt.NDArray[np.int64]]:
    """First tokens of the rows of each batch from the middle on: what the loader reads, computed beforehand."""
    loader = _loader(folder, prefetch_steps=0)
    order, first = loader.course.order, loader.num_samples // BATCH // 2 * BATCH
    starts = order.rows(np.arange(first, first + 4096 * BATCH)).starts.reshape(-1, BATCH)
    loader.close()
    yield starts[0]  # the batch that opens: the loader's is of the beginning, where it is as cold
    yield from starts


def _open_torchdata(folder: Path) -> Opened:
    """A map-style dataset over the maps, a shuffled sampler, the default collation, in the training process as the others are."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found,unused-ignore]  # no dependency of ours

    shards = _maps(folder, random=True)

    class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __len__(self) -> int:
            return (len(shards) * len(shards[0]) - 1) // SEQ_LEN

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = torch.from_numpy(_slice(shards, index * SEQ_LEN).astype(np.int64))
            return row[:-1], row[1:]

    loader = StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True, num_workers=0)
    batches = [iter(loader)]

    def seek() -> None:
        state = loader.state_dict()
        middle = NUM_SAMPLES // BATCH // 2
        state["_num_yielded"] = state["_sampler_iter_yielded"] = middle
        if state.get("_sampler_iter_state"):
            state["_sampler_iter_state"]["samples_yielded"] = middle * BATCH
        loader.load_state_dict(state)
        batches[0] = iter(loader)

    return lambda: next(batches[0]), seek


def _open_streaming(folder: Path) -> Opened:
    """Local MDS shards of the default 64 MiB, holes as ours are, in its default shuffle of one node."""
    from streaming import StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found,unused-ignore]  # no dependency of ours

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH, num_canonical_nodes=1)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0)
    batches = [iter(loader)]

    def seek() -> None:
        loader.load_state_dict({**loader.state_dict(), "sample_in_epoch": NUM_SAMPLES // 2 // BATCH * BATCH})
        batches[0] = iter(loader)

    def next_batch() -> object:
        rows = next(batches[0])["tokens"].long()
        return rows[:, :-1], rows[:, 1:]

    return next_batch, seek


def _make_mds(folder: Path) -> None:
    from streaming import MDSWriter  # type: ignore[import-not-found,unused-ignore]  # no dependency of ours

    if (folder / "mds" / "index.json").exists():
        return
    with MDSWriter(out=str(folder / "mds-one"), columns={"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}) as writer:
        for _ in range(17_000):  # a little more than one shard
            writer.write({"tokens": np.zeros(SEQ_LEN + 1, dtype=np.uint16)})
    index = json.loads((folder / "mds-one" / "index.json").read_text())
    first = index["shards"][0]
    (folder / "mds").mkdir()
    shards = []
    for number in range(-(-NUM_SAMPLES // first["samples"])):
        name = f"shard.{number:05d}.mds"
        subprocess.run(["cp", "--sparse=always", folder / "mds-one" / first["raw_data"]["basename"], folder / "mds" / name], check=True)
        shards.append({**first, "raw_data": {**first["raw_data"], "basename": name}})
    (folder / "mds" / "index.json").write_text(json.dumps({**index, "shards": shards}))


def _can_run(side: str, folder: Path) -> bool:
    """Whether the package of this side imports; says so when it does not."""
    try:
        _import_for(side)
        if side == "streaming":
            _make_mds(folder)
    except ImportError as error:
        print(f"{side} is left out: {error}", flush=True)
        return False
    return True


def _import_for(side: str) -> None:
    """What a side imports before its memory counts."""
    import surefoot.data.loader  # noqa: F401

    if side == "torchdata":
        import torchdata.stateful_dataloader  # type: ignore[import-not-found,unused-ignore]  # no dependency of ours  # noqa: F401
    if side == "streaming":
        import streaming  # type: ignore[import-not-found,unused-ignore]  # no dependency of ours  # noqa: F401


_OPENERS: dict[str, Callable[[Path], Opened]] = {
    "memmap": lambda folder: _open_memmap(folder, random=False),
    "memmap-random": _open_memmap,
    "memmap-packed": lambda folder: _open_memmap(folder, packed=True),
    OURS: _open_surefoot,
    "surefoot-no-thread": lambda folder: _open_surefoot(folder, prefetch_steps=0),
    "torchdata": _open_torchdata,
    "streaming": _open_streaming,
}

if __name__ == "__main__":
    sys.exit(main())
