"""Prepared data of 15T tokens and 2e9 samples, as files: how long until it is open, sought in, and asked both ways; memory and open files.

    python -m benchmarks.data_scale [--shards 27940] [--work build/data-scale]

The folder has every shard of such a data set with its manifest, headers, checksums and the files beside the tokens, all but one of them
names of one file: it takes about 1.2 GB. The code that opens it is that of a run. Exit 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from benchmarks.data_folders import SOURCE, sparse_folder

Answer = TypeVar("Answer")

SHARD_TOKENS = 1 << 29  # 1 GiB of u16
SEQ_LEN = 7_500
BATCH = 512
TARGETS_MS = {"seek to the middle": 50.0, "step to documents": 1000.0, "document to steps": 1000.0, "span to steps": 1000.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=27_940)
    parser.add_argument("--work", type=Path, default=Path("build/data-scale"))
    options = parser.parse_args()
    folder = options.work / str(options.shards)
    marked = sparse_folder(folder, num_shards=options.shards, shard_tokens=SHARD_TOKENS, marked_shard=options.shards * 5 // 8)
    assert marked is not None
    return 0 if _measure(folder, marked.hash) else 1


def _measure(folder: Path, marked_hash: str) -> bool:
    from surefoot.core.blocking import TokenSpan
    from surefoot.core.sections import DataSection, SourceSection, TrainSection
    from surefoot.data.loader import ShardedLoader
    from surefoot.data.provenance import Provenance

    before_kb, before_files = _status_kb("VmRSS"), _open_files()
    data = DataSection(seq_len=SEQ_LEN, sources=(SourceSection(name=SOURCE),), prefetch_steps=0)
    train = TrainSection(num_steps=1_000_000, global_batch_size=BATCH, micro_batch_size=16)
    took: dict[str, float] = {}
    loader: Any = _timed(took, "open", lambda: ShardedLoader(str(folder), data=data, train=train, seed=1, rank=0, num_ranks=32))
    num_samples = loader.num_samples
    _timed(took, "first step, with the sizes of all files", lambda: next(loader))
    middle = loader.cursor_after(num_samples // BATCH // 2)
    _timed(took, "seek to the middle", lambda: loader.seek(middle))
    _timed(took, "first step there", lambda: next(loader))
    _timed(took, "next step", lambda: next(loader))
    with Provenance(str(folder), manifest=loader.manifest) as provenance:
        sample = int(loader.course.order.step_samples(loader.next_sample)[7])
        found = _timed(took, "step to documents", lambda: [one for span in _spans(loader, sample) for one in provenance.documents(span)])
        assert len(found) in range(7, 11), found
        places = _timed(took, "document to steps", lambda: provenance.find(marked_hash))
        assert len(places) == 1, places
        order, span = loader.course.order, TokenSpan(SOURCE, places[0].span.start, places[0].span.end)
        times = _timed(took, "span to steps", lambda: order.holding(SOURCE, span.start, span.end, first=0, until=2 * num_samples))
        assert times.size in range(2, 5), times
        files = _open_files() - before_files
    print(f"{folder.name} shards, {loader.manifest.split(SOURCE, 'train').tokens:.4g} tokens, {num_samples:.4g} samples of {SEQ_LEN}")
    for what, value_s in took.items():
        target = TARGETS_MS.get(what)
        word = f", below {target:g}: {'met' if 1e3 * value_s < target else 'MISSED'}" if target else ""
        print(f"{what}: {1e3 * value_s:.1f} ms{word}")
    print(f"memory above the imports {(_status_kb('VmHWM') - before_kb) / 1024:.0f} MB, open files {files}")
    print(f"manifest {(folder / 'manifest.json').stat().st_size / 1e6:.1f} MB, on disk {_on_disk(folder) / 1e6:.0f} MB")
    return all(1e3 * took[what] < most for what, most in TARGETS_MS.items())


def _spans(loader: Any, sample: int) -> list[Any]:
    from surefoot.core.blocking import TokenSpan

    at = loader.course.order.at(np.array([sample]))[0]
    return [TokenSpan(at.source, start, start + count) for start, count in at.spans]


def _timed(took: dict[str, float], what: str, work: Callable[[], Answer]) -> Answer:
    began_s = time.perf_counter()
    answer = work()
    took[what] = time.perf_counter() - began_s
    return answer


def _status_kb(name: str) -> int:
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)).split()[1])


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _on_disk(folder: Path) -> int:
    inodes = {status.st_ino: status.st_blocks * 512 for status in (path.stat() for path in folder.rglob("*"))}
    return sum(inodes.values())


if __name__ == "__main__":
    sys.exit(main())
