"""What preparing costs beside bare tokenizing: `data prepare` against `tokenizers` over the same texts.

    python benchmarks/prepare.py [--megabytes 24] [--workers 2] [--rounds 5] [--tokenizer FILE]

All use the same tokenizer and as many threads or processes, each in a fresh process, by turns: encode_batch, encode_batch_fast (without
offsets), prepare, and again. The texts are files of Python's own library, as JSONL, repeated under other first lines until there are
enough. The bare ones are handed them in memory and keep nothing; prepare reads and parses the file twice, hashes, drops copies, tokenizes,
and writes shards with checksums, provenance, indexes and signatures to disk. The target is 0.7 of the throughput of encode_batch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from surefoot.core.sections import SourceSection
from surefoot.data.corpus import PYTHON_STDLIB, list_files
from surefoot.data.documents import read_documents
from surefoot.data.prepare import prepare
from surefoot.data.tokenizer import load_tokenizer, train_bpe

TARGET = 0.7
_BATCH_TEXTS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; else a BPE of 8192 trained on the texts")
    parser.add_argument("--alone", choices=list(_KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        _run_alone(_KINDS[options.alone], folder=options.folder, workers=options.workers)
        return
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as name:
        folder = Path(name)
        num_bytes = _write_corpus(folder, num_bytes=options.megabytes << 20, tokenizer=options.tokenizer)
        took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
        for _ in range(options.rounds):
            for which in took:
                took[which].append(_in_a_process(which, folder=folder, workers=options.workers))
    _report(took, num_bytes=num_bytes, workers=options.workers)


def _write_corpus(folder: Path, *, num_bytes: int, tokenizer: Path | None) -> int:
    """texts.jsonl and tokenizer.json; the bytes of text."""
    files = list_files([PYTHON_STDLIB], source="text")
    texts = [document.text for document in read_documents(files, source="text", on_bad=lambda _: None)]
    written = 0
    with (folder / "texts.jsonl").open("w") as lines:
        for text in _enough(texts, num_bytes=num_bytes):
            lines.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
    codec = load_tokenizer(tokenizer) if tokenizer else train_bpe(texts, vocab_size=8192)
    (folder / "tokenizer.json").write_bytes(codec.json_bytes)
    return written


def _enough(texts: list[str], *, num_bytes: int) -> Iterator[str]:
    written, lap = 0, 0
    while True:
        for text in texts:
            yield f"# {lap}\n{text}"
            written += len(text)
            if written >= num_bytes:
                return
        lap += 1


def _in_a_process(which: str, *, folder: Path, workers: int) -> tuple[float, float]:
    """Wall and CPU seconds of one go, without what starting Python and reading the texts into memory takes."""
    command = [sys.executable, __file__, "--alone", which, "--folder", str(folder), "--workers", str(workers)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true" if workers > 1 else "false"}
    wall_s, cpu_s = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    return wall_s, cpu_s


def _run_alone(what: Callable[..., Callable[[], None]], *, folder: Path, workers: int) -> None:
    go = what(folder, workers=workers)
    begin_s, begin_cpu_s = time.monotonic(), _cpu_s()
    go()
    print(json.dumps([time.monotonic() - begin_s, _cpu_s() - begin_cpu_s]))


def _encode_batch(folder: Path, *, workers: int) -> Callable[[], None]:
    texts, codec = _in_memory(folder)

    def go() -> None:
        for first in range(0, len(texts), _BATCH_TEXTS):
            codec.encode_batch(texts[first : first + _BATCH_TEXTS])

    return go


def _encode_batch_fast(folder: Path, *, workers: int) -> Callable[[], None]:
    texts, codec = _in_memory(folder)

    def go() -> None:
        for first in range(0, len(texts), _BATCH_TEXTS):
            codec.encode_batch_fast(texts[first : first + _BATCH_TEXTS])

    return go


def _in_memory(folder: Path) -> tuple[list[str], Any]:
    with (folder / "texts.jsonl").open() as lines:
        return [json.loads(line)["text"] for line in lines], Tokenizer.from_file(str(folder / "tokenizer.json"))


def _prepare(folder: Path, *, workers: int) -> Callable[[], None]:
    source = SourceSection(name="text", files=(str(folder / "texts.jsonl"),))

    def go() -> None:
        prepare([source], out=folder / "out", tokenizer=str(folder / "tokenizer.json"), workers=workers, force=True)

    return go


def _cpu_s() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _report(took: dict[str, list[tuple[float, float]]], *, num_bytes: int, workers: int) -> None:
    rounds = len(took["prepare"])
    print(f"{num_bytes / 1e6:.1f} MB of text, {workers} threads or processes, {rounds} rounds by turns, medians (least to most)")
    for kind, goes in took.items():
        walls, cpus = ([go[part] for go in goes] for part in (0, 1))
        rate = num_bytes / 1e6 / statistics.median(walls)
        spread = f"({min(walls):.2f} to {max(walls):.2f})"
        print(f"{kind:<18} {statistics.median(walls):6.2f} s wall {spread}  {statistics.median(cpus):6.2f} CPU-seconds  {rate:6.2f} MB/s")
    for bare in ("encode_batch", "encode_batch_fast"):
        by_wall, by_cpu = (
            sorted(one[part] / other[part] for one, other in zip(took[bare], took["prepare"], strict=True)) for part in (0, 1)
        )
        spread = f"({by_wall[0]:.2f} to {by_wall[-1]:.2f})"
        print(f"of {bare}: {statistics.median(by_wall):.2f} of its throughput {spread}, {statistics.median(by_cpu):.2f} by CPU-seconds")
        if bare == "encode_batch":
            print(f"target: at least {TARGET}: {'met' if statistics.median(by_wall) >= TARGET else 'missed'}")


_KINDS: Mapping[str, Callable[..., Callable[[], None]]] = {
    "encode_batch": _encode_batch,
    "encode_batch_fast": _encode_batch_fast,
    "prepare": _prepare,
}

if __name__ == "__main__":
    main()
