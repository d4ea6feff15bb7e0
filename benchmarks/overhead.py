"""What does surefoot cost? `surefoot train` with everything on against a plain eager loop, like for like, in interleaved rounds.

    python benchmarks/overhead.py [--rounds 10] [--case one-process] [--case two-ranks]

Both train the same model from the same weights on the same batches for the same steps, and both save (at least three saves lie inside the
timed window). tokens/s is wall time between two steps of one process; CPU-seconds are those of all ranks, for surefoot its agent's added.
Prints one JSON line a round and a summary of medians and spreads; exit 1 when a median misses its
bound, or the losses differ by more than 1e-4 in the first 50 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from surefoot.config import load_config
from surefoot.data.loader import ShardedLoader
from surefoot.data.prepare import prepare
from surefoot.observe.metrics import read_steps

HERE = Path(__file__).parent
WARM_STEPS = 10
LOSS_TOLERANCE = 1e-4
LEAST_TOKENS_RATIO, MOST_CPU_RATIO = 0.95, 1.05


@dataclass(frozen=True)
class Case:
    """`threads` per rank: both cases use two cores."""

    name: str
    num_ranks: int
    threads: int


CASES = {case.name: case for case in (Case("one-process", 1, 2), Case("two-ranks", 2, 1))}


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    cpu_s: float
    losses: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=63)
    parser.add_argument("--save-every", type=int, default=15)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--work", type=Path, default=Path("build/overhead"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    agree = True
    for name in options.case or CASES:
        agree = _run_case(CASES[name], options) and agree
    return 0 if agree else 1


def _run_case(case: Case, options: argparse.Namespace) -> bool:
    config_path = _write_config(case, options)
    batches = _export_batches(config_path, case, options)
    rounds: list[dict[str, float]] = []
    worst = 0.0
    for index in range(options.rounds):
        # Who goes first alternates, so that a machine that slows down or speeds up favours nobody.
        order = ("surefoot", "plain") if index % 2 == 0 else ("plain", "surefoot")
        got = {who: (_surefoot if who == "surefoot" else _plain)(case, config_path, batches, options) for who in order}
        differences = [abs(a - b) for a, b in zip(got["surefoot"].losses[:50], got["plain"].losses[:50], strict=True)]
        worst = max(worst, *differences)
        row = {
            "tokens_ratio": got["surefoot"].tokens_per_s / got["plain"].tokens_per_s,
            "cpu_ratio": got["surefoot"].cpu_s / got["plain"].cpu_s,
            "surefoot_tokens_per_s": got["surefoot"].tokens_per_s,
            "plain_tokens_per_s": got["plain"].tokens_per_s,
            "loss_difference": max(differences),
        }
        rounds.append(row)
        print(json.dumps({"case": case.name, "round": index + 1, **{key: round(value, 7) for key, value in row.items()}}), flush=True)
    medians = {}
    for key in ("tokens_ratio", "cpu_ratio"):
        values = sorted(row[key] for row in rounds)
        medians[key] = statistics.median(values)
        print(f"{case.name}: {key} median {medians[key]:.3f}, from {values[0]:.3f} to {values[-1]:.3f}")
    met = medians["tokens_ratio"] >= LEAST_TOKENS_RATIO and medians["cpu_ratio"] <= MOST_CPU_RATIO
    print(f"{case.name}: tokens at least {LEAST_TOKENS_RATIO}x, CPU-seconds at most {MOST_CPU_RATIO}x: {'met' if met else 'MISSED'}")
    print(f"{case.name}: largest difference of loss in the first 50 steps {worst:.2e} (limit {LOSS_TOLERANCE:g})", flush=True)
    return met and worst <= LOSS_TOLERANCE


def _write_config(case: Case, options: argparse.Namespace) -> Path:
    work = options.work.resolve()
    path: Path = work / f"{case.name}.toml"
    path.write_text(
        f"""
[run]
name = "{case.name}"
dir = "run-{case.name}"
seed = 5
[data]
path = "data"
[[data.sources]]
name = "stdlib"
files = ["builtin:python-stdlib"]
[model]
preset = "quickstart"
[train]
num_steps = {options.steps}
global_batch_size = 8
micro_batch_size = 4
eval_interval_steps = 0
eval_num_samples = 4
[schedule]
warmup_steps = 20
[parallel]
dp_replicate = {case.num_ranks}
[checkpoint]
interval_steps = {options.save_every}
[launch]
threads_per_rank = {case.threads}
"""
    )
    return path


def _export_batches(config_path: Path, case: Case, options: argparse.Namespace) -> Path:
    config = load_config(config_path).config
    if not (Path(config.data.path) / "manifest.json").exists():
        prepare(config.data.sources, out=config.data.path, tokenizer=config.data.tokenizer)
    exported: dict[str, Any] = {}
    live_tokens = [0] * options.steps
    for rank in range(case.num_ranks):
        loader = ShardedLoader(
            config.data.path, data=config.data, train=config.train, seed=config.run.seed, rank=rank, num_ranks=case.num_ranks
        )
        exported["vocab_size"] = loader.vocab_size
        steps = []
        for index in range(options.steps):
            batch = next(loader)
            live_tokens[index] += batch.num_live_tokens
            steps.append(
                [
                    {"tokens": atom.tokens_BS, "labels": atom.labels_BS, "positions": atom.positions_BS, "doc_ids": atom.doc_ids_BS}
                    for atom in batch.micro_batches
                ]
            )
        exported[f"rank_{rank}"] = steps
    exported["live_tokens"] = live_tokens
    path = config_path.with_suffix(".batches.pt")
    torch.save(exported, path)
    return path


def _surefoot(case: Case, config_path: Path, batches: Path, options: argparse.Namespace) -> Measured:
    run_dir = config_path.parent / f"run-{case.name}"
    shutil.rmtree(run_dir, ignore_errors=True)
    agent = subprocess.Popen([sys.executable, "-m", "surefoot.cli.main", "train", str(config_path)], stdout=subprocess.DEVNULL)
    samples: list[tuple[float, float]] = []
    watcher = threading.Thread(target=_sample_cpu, args=(agent.pid, samples))
    watcher.start()
    try:
        assert agent.wait(timeout=600) == 0, "surefoot train failed"
    finally:
        agent.kill()
        watcher.join()
    rows = read_steps(run_dir).to_pylist()
    first, last = rows[WARM_STEPS - 1], rows[-2]  # the last step evaluates, which the plain loop does not
    agents_cpu_s = _at(samples, last["mono_s"]) - _at(samples, first["mono_s"])
    tokens = sum(row["num_live_tokens"] for row in rows[WARM_STEPS:-1])
    return Measured(
        tokens_per_s=tokens / (last["mono_s"] - first["mono_s"]),
        cpu_s=last["cpu_s"] - first["cpu_s"] + agents_cpu_s,
        losses=[row["loss"] for row in rows],
    )


def _plain(case: Case, config_path: Path, batches: Path, options: argparse.Namespace) -> Measured:
    out = config_path.parent / f"plain-{case.name}"
    out.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(HERE / "plain_loop.py"), "--config", str(config_path), "--batches", str(batches), "--out", str(out)]
    command += ["--save-every", str(options.save_every), "--threads", str(case.threads)]
    ranks = []
    for rank in range(case.num_ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(case.num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen(command, env=env))
    try:
        for process in ranks:
            assert process.wait(timeout=600) == 0, "the plain loop failed"
    finally:
        for process in ranks:
            process.kill()
    by_rank = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(case.num_ranks)]
    live_tokens = torch.load(batches, weights_only=True)["live_tokens"]
    first, last = WARM_STEPS - 1, options.steps - 2
    return Measured(
        tokens_per_s=sum(live_tokens[WARM_STEPS:-1]) / (by_rank[0][last]["mono_s"] - by_rank[0][first]["mono_s"]),
        cpu_s=sum(rows[last]["cpu_s"] - rows[first]["cpu_s"] for rows in by_rank),
        losses=[sum(rows[step]["loss_sum"] for rows in by_rank) / live_tokens[step] for step in range(options.steps)],
    )


def _sample_cpu(pid: int, samples: list[tuple[float, float]]) -> None:
    """(monotonic, CPU-seconds so far) of one process until it ends, four times a second."""
    try:
        process = psutil.Process(pid)
        while True:
            times = process.cpu_times()
            samples.append((time.monotonic(), times.user + times.system))
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.25)
    except psutil.NoSuchProcess:
        return


def _at(samples: list[tuple[float, float]], mono_s: float) -> float:
    """The last sample before `mono_s`: at most a quarter of a second old."""
    return max((cpu_s for when_s, cpu_s in samples if when_s <= mono_s), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
