"""What do audits cost? Two ranks train; after each step of every other block of ten both halves of an audit are made, and timed apart.

    python benchmarks/audit.py [--layout shards] [--layout copies] [--steps 100] [--micro-steps 2]

CPU-seconds are those of all ranks with all their threads. A step is timed in the blocks without audits; those with audits show whether a
step after an audit costs more. Overhead at a cadence of K steps: one audit over K steps. Prints one JSON line a layout, and a table.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.core.sections import (
    DataSection,
    LaunchSection,
    ModelSection,
    ParallelSection,
    RunConfig,
    RunSection,
    SourceSection,
    TrainSection,
)
from surefoot.data.prepare import prepare
from surefoot.guard.audit import Audit
from surefoot.guard.state import TrainState
from surefoot.parallel.clip import scale_gradients
from surefoot.tensors.process_group import connected, set_threads
from surefoot.train.build import build_parts, make_deterministic
from surefoot.train.recompute import Recompute
from surefoot.train.step import Parts, forward_backward

NUM_RANKS = 2
BLOCK_STEPS = 10
CADENCES = (1, 10, 100)
LAYOUTS = {"copies": ParallelSection(dp_replicate=NUM_RANKS), "shards": ParallelSection(dp_shard=NUM_RANKS)}
WARM_STEPS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-steps", type=int, default=2, help="atoms of each rank in a step: an audit computes one")
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("build/audit"))
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        print(json.dumps(_measure(_config(options, options.layout[0]), num_steps=options.steps)), flush=True)
        return 0
    data = options.work / "data"
    if not (data / "manifest.json").exists():
        prepare([SourceSection(name="stdlib", files=("builtin:python-stdlib",))], out=data, tokenizer="bytes")
    for layout in options.layout or LAYOUTS:
        _show(layout, _on_ranks(options, layout))
    return 0


def _config(options: argparse.Namespace, layout: str) -> RunConfig:
    model = ModelSection(num_layers=options.num_layers, d_model=options.d_model, num_heads=options.d_model // 32)
    num_samples = NUM_RANKS * options.micro_steps * 2
    return RunConfig(
        run=RunSection(name="audit", seed=1),
        data=DataSection(path=str(options.work / "data"), seq_len=256),
        model=model,
        train=TrainSection(num_steps=10_000, global_batch_size=num_samples, micro_batch_size=2, eval_interval_steps=0),
        parallel=LAYOUTS[layout],
        launch=LaunchSection(threads_per_rank=1),
    )


def _on_ranks(options: argparse.Namespace, layout: str) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, __file__, "--layout", layout]
    for name in ("steps", "micro_steps", "d_model", "num_layers", "work"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    world = {"WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env={**os.environ, **{name: str(value) for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}},
            stdout=subprocess.PIPE,
        )
        for rank in range(NUM_RANKS)
    ]
    told = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    return [json.loads(lines.splitlines()[-1]) for lines in told]


def _measure(config: RunConfig, *, num_steps: int) -> dict[str, Any]:
    """On one rank: CPU-seconds of each step in blocks without and with audits, and of each half of each audit."""
    set_threads(config.launch)
    make_deterministic(config.numerics)
    took: dict[str, list[float]] = {"step": [], "step_beside_audits": [], "replicas": [], "recompute": []}
    with connected(config.launch) as world:
        parts = build_parts(config, world)
        state = TrainState(model=parts.cut.module, optimizer=parts.optimizer, data=parts.data)
        recompute = Recompute(parts, last_step=lambda: state.step - 1)
        audit = Audit(state, config=config, world=world, recorder=None, recompute=recompute)
        for _ in range(WARM_STEPS):
            _step(parts, state)
        audit.run(state.step)
        for number in range(2 * num_steps):
            audits = number // BLOCK_STEPS % 2 == 1
            took["step_beside_audits" if audits else "step"].append(_cpu_s(lambda: _step(parts, state)))
            if audits:
                took["replicas"].append(_cpu_s(audit.compare_replicas))
                took["recompute"].append(_cpu_s(audit.compare_gradients))
        parts.data.close()
        num_parameters = sum(parameter.numel() for parameter in parts.parameters)
    return {"num_parameters": num_parameters, "tokens": config.train.global_batch_size * config.data.seq_len, **took}


def _step(parts: Parts, state: TrainState) -> None:
    batch = next(parts.data)
    forward_backward(parts, batch.micro_batches, step=state.step)
    scale_gradients(parts.parameters, 1e-4)
    parts.optimizer.step()
    parts.optimizer.zero_grad()
    state.step += 1


def _cpu_s(part: Callable[[], object]) -> float:
    """Of this process, all threads: what a rank waits for costs it next to nothing."""
    began_s = time.process_time()
    part()
    return time.process_time() - began_s


def _show(layout: str, ranks: list[dict[str, Any]]) -> None:
    names = ("step", "step_beside_audits", "replicas", "recompute")
    cpu_s = {name: sum(statistics.median(rank[name]) for rank in ranks) for name in names}
    overhead = {half: {str(every): cpu_s[half] / every / cpu_s["step"] for every in CADENCES} for half in ("replicas", "recompute")}
    sizes = {name: ranks[0][name] for name in ("num_parameters", "tokens")}
    print(json.dumps({"layout": layout, **sizes, "cpu_s": cpu_s, "overhead": overhead}), flush=True)
    print(f"{layout}: {sizes['num_parameters'] / 1e6:.1f}M parameters, {sizes['tokens']} tokens a step, {cpu_s['step']:.3f} CPU-s a step")
    print(f"  a step between audits: {cpu_s['step_beside_audits'] / cpu_s['step']:.3f}x")
    for half, by_cadence in overhead.items():
        curve = ", ".join(f"each {every} steps {share:.3%}" for every, share in by_cadence.items())
        print(f"  {half}: {cpu_s[half]:.4f} CPU-s an audit: {curve}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
