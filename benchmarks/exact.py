"""What do exact sums cost, and do they change what is learnt? Exact against float sums, on two ranks, in interleaved rounds.

    python benchmarks/exact.py [--rounds 5] [--case one-reduction] [--case zero-3]
    python benchmarks/exact.py --quality [--steps 500] [--seeds 1 2 3]

Cost: a model of 12M parameters, micro-steps of 1,024 tokens, CPU-seconds of the steps on all ranks after the first ones; the optimizer
kernel is foreach on both sides, and float sums with the fused kernel are shown beside. Prints one JSON line a round, with the bytes that
each kind of collective was given in one step by one rank and the float64 bytes of its unsharded gradients; exit 1 when a median misses its
bound. Quality: a small model on Python's own library; the held-out losses of both, seed by seed, and how far seeds are apart.
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
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    LaunchSection,
    ModelSection,
    NumericsSection,
    OptimizerSection,
    ParallelSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    SourceSection,
    TrainSection,
)
from surefoot.data.prepare import prepare
from surefoot.tensors.heap import keep_freed_pages
from surefoot.train.loop import open_run
from surefoot.train.step import train_step

NUM_RANKS = 2
WARM_STEPS = 2
MIDDLE_SIZED = ModelSection(num_layers=6, d_model=384, num_heads=6, d_ff=1024, vocab_size=4096, tie_embeddings=False)
SMALL = ModelSection(num_layers=3, d_model=96, num_heads=4, d_ff=256)
VARIANTS = {"float": ("float", "foreach"), "exact": ("exact", "foreach"), "float-fused": ("float", "fused")}


@dataclass(frozen=True)
class Case:
    """`most` is what CPU-seconds may grow by."""

    name: str
    parallel: ParallelSection
    most: float


CASES = {
    case.name: case
    for case in (Case("one-reduction", ParallelSection(dp_replicate=2), 0.10), Case("zero-3", ParallelSection(dp_shard=2), 0.15))
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of each run; 8 for cost, 500 for quality")
    parser.add_argument("--micro-steps", type=int, default=4, help="of each rank in a step")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=Path("build/exact"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return _be_a_rank(json.loads(options.rank_of))
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "data").exists():
        source = SourceSection(name="python", files=("builtin:python-stdlib",))
        prepare([source], out=options.work / "data", tokenizer="bytes", heldout_fraction=0.02)
    if options.quality:
        return _compare_quality(options)
    return 0 if all([_compare_cost(CASES[name], options) for name in options.case or CASES]) else 1


def _compare_cost(case: Case, options: argparse.Namespace) -> bool:
    ratios: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for index in range(options.rounds):
        order = list(VARIANTS)[index % len(VARIANTS) :] + list(VARIANTS)[: index % len(VARIANTS)]
        told = {name: _train(name, case.name, options, seed=0, steps=options.steps or 8) for name in order}
        cpu_s = {name: sum(rank["cpu_s"] for rank in ranks) for name, ranks in told.items()}
        for name in VARIANTS:
            ratios[name].append(cpu_s[name] / cpu_s["float"])
        line = {"case": case.name, "round": index, "cpu_s": {name: round(value, 3) for name, value in cpu_s.items()}}
        if index == 0:
            line["bytes"] = {name: ranks[0]["bytes"] for name, ranks in told.items()}
            line["unsharded_gradient_bytes"] = {name: ranks[0]["gradient_bytes"] for name, ranks in told.items()}
        print(json.dumps(line), flush=True)
    more = statistics.median(ratios["exact"]) - 1
    within = more <= case.most
    spread = f"{min(ratios['exact']) - 1:+.1%} to {max(ratios['exact']) - 1:+.1%}"
    fused = statistics.median(ratios["float-fused"]) - 1
    print(
        f"{case.name}: exact sums take {more:+.1%} CPU ({spread}, {options.rounds} rounds, {options.micro_steps} micro-steps a step); "
        f"at most {case.most:+.0%}: {'kept' if within else 'MISSED'}; float sums with the fused kernel {fused:+.1%}",
        flush=True,
    )
    return within


def _compare_quality(options: argparse.Namespace) -> int:
    losses: dict[str, list[float]] = {"float": [], "exact": []}
    for seed in options.seeds:
        for name, found in losses.items():
            found.append(_train(name, "zero-3", options, seed=seed, steps=options.steps or 500, quality=True)[0]["val_loss"])
        print(json.dumps({"seed": seed, **{name: found[-1] for name, found in losses.items()}}), flush=True)
    apart = [exact - plain for exact, plain in zip(losses["exact"], losses["float"], strict=True)]
    noise = statistics.stdev(losses["float"]) if len(options.seeds) > 1 else 0.0
    print(f"exact - float: {statistics.mean(apart):+.2e} on average, {max(map(abs, apart)):.2e} at most; seeds are {noise:.2e} apart")
    return 0 if max(map(abs, apart)) <= max(noise, 1e-3) else 1


def _train(variant: str, case: str, options: argparse.Namespace, *, seed: int, steps: int, quality: bool = False) -> list[dict[str, Any]]:
    """Both ranks of one run as processes of their own; what each tells."""
    run_dir = options.work / f"run-{variant}"
    shutil.rmtree(run_dir, ignore_errors=True)
    told = {"variant": variant, "case": case, "seed": seed, "steps": steps, "quality": quality, "micro_steps": options.micro_steps}
    told |= {"data": str(options.work / "data"), "run_dir": str(run_dir)}
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as listener:  # handed over: a port that was only looked up may be taken by then
        for rank in range(NUM_RANKS):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
            env |= {"SUREFOOT_LISTEN_FD": str(listener.fileno()), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--rank-of", json.dumps(told)]
            fds = (listener.fileno(),) if rank == 0 else ()
            ranks.append(subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True, pass_fds=fds))
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{variant} failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _be_a_rank(told: dict[str, Any]) -> int:
    config = _config(told)
    keep_freed_pages()  # as every rank of `surefoot train`
    with open_run(config) as (parts, guard):
        guard.restore()
        started_s, val_loss, given = 0.0, None, Counter[str]()
        while guard.begin():
            if guard.step == WARM_STEPS - 1:
                with _Counting(given):
                    report = train_step(parts, guard)
            else:
                report = train_step(parts, guard)
            if report.step == WARM_STEPS:
                started_s = time.process_time()
            if report.step == config.train.num_steps - 1:  # the last one evaluates and saves
                cpu_s = time.process_time() - started_s
            val_loss = report.val_loss if report.val_loss is not None else val_loss
    size = sum(parameter.numel() for parameter in parts.parameters) * (8 if config.numerics.sums == "exact" else 4)
    print(json.dumps({"cpu_s": cpu_s, "val_loss": val_loss, "bytes": dict(given), "gradient_bytes": size}))
    return 0


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # unannotated in torch
    """Bytes that collectives are given, by their name; those of the largest argument, which is what a rank has to add or hand out."""

    def __init__(self, given: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._given = given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [tensor.nbytes for argument in args for tensor in _tensors(argument)]
            self._given[func.overloadpacket.__name__.strip("_")] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [tensor for part in argument for tensor in _tensors(part)] if isinstance(argument, list | tuple) else []


def _config(told: dict[str, Any]) -> RunConfig:
    sums, kernel = VARIANTS[told["variant"]]
    micro_batch_size, seq_len = (4, 128) if told["quality"] else (4, 256)
    return RunConfig(
        run=RunSection(name="exact", dir=told["run_dir"], seed=told["seed"]),
        model=SMALL if told["quality"] else MIDDLE_SIZED,
        data=DataSection(path=told["data"], seq_len=seq_len),
        train=TrainSection(
            num_steps=told["steps"],
            global_batch_size=micro_batch_size * NUM_RANKS * (2 if told["quality"] else told["micro_steps"]),
            micro_batch_size=micro_batch_size,
            eval_interval_steps=0,
            eval_num_samples=64 if told["quality"] else 4,
        ),
        optimizer=OptimizerSection(lr=1e-3, kernel=kernel),  # type: ignore[arg-type]  # one of its literals
        schedule=ScheduleSection(kind="wsd", warmup_steps=max(1, told["steps"] // 10)),
        parallel=CASES[told["case"]].parallel,
        numerics=NumericsSection(sums=sums),  # type: ignore[arg-type]  # as above
        checkpoint=CheckpointSection(interval_steps=100_000, prove=False),
        launch=LaunchSection(threads_per_rank=1),
    )


if __name__ == "__main__":
    sys.exit(main())
