"""Does anything act on runs that are healthy? Short runs of small models, one after the other; what any detector said of them.

    python -m benchmarks.clean_runs [--runs 20] [--steps 500] [--only high-rate --only tiny-batch]

The settings take turns, on one rank and on three: an even one, a rate near the edge, a batch that is all noise, mixtures whose sources are
far apart, bfloat16 by rounding the operands of every product, fully sharded ranks. Prints one JSON line a run, with every rule that spoke,
and what it asked for; exit 1 when any run skipped, repeated, went back or stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    LaunchSection,
    ModelSection,
    MonitorSection,
    OptimizerSection,
    ParallelSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    SourceSection,
    TrainSection,
)
from surefoot.data.prepare import prepare
from surefoot.observe.ledger import read_ledger
from surefoot.observe.metrics import read_steps
from surefoot.train.loop import open_run
from surefoot.train.step import train_step

SOURCES: Final = ("code", "digits")
ACTED: Final = frozenset(
    {
        Event.UPDATE_SKIPPED,
        Event.STEP_RECHECKED,
        Event.EPISODE_OPENED,
        Event.RUN_ROLLED_BACK,
        Event.RUN_PAUSED,
        Event.RUN_HALTED,
        Event.CHECKPOINT_SUSPECTED,
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """`changes` are by section of the config; `digits` the share of the source that is nothing like the other."""

    name: str
    num_ranks: int = 1
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    digits: float = 0.0
    rounded: bool = False


SETTINGS: Final = (
    Setting("even"),
    Setting("even-3-ranks", num_ranks=3),
    Setting("high-rate", changes={"optimizer": {"lr": 2e-2}}),
    Setting("tiny-batch", changes={"train": {"global_batch_size": 2, "micro_batch_size": 2}, "data": {"seq_len": 32}}),
    Setting("rounded-to-bf16", rounded=True),
    Setting("rare-source", num_ranks=3, digits=0.01),
    Setting("d128-decay", changes={"model": {"d_model": 128, "num_layers": 3}, "schedule": {"kind": "cosine"}}),
    Setting("sharded", num_ranks=3, changes={"parallel": {"dp_shard": 3}}),
    Setting("two-sources", digits=0.3),
    Setting("rounded-3-ranks", num_ranks=3, rounded=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", action="append", choices=[setting.name for setting in SETTINGS])
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each further one has the next")
    parser.add_argument("--work", type=Path, default=Path("build/clean"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        told = json.loads(options.rank_of)
        train(config_of(_named(told["setting"]), **told["config"]), rounded=_named(told["setting"]).rounded)
        return 0
    data = prepare_sources(options.work)
    settings = [setting for setting in SETTINGS if not options.only or setting.name in options.only]
    acted = 0
    for index in range(options.runs):
        setting, seed = settings[index % len(settings)], options.seed + index
        run_dir = options.work / f"run-{seed}"
        shutil.rmtree(run_dir, ignore_errors=True)
        began_s = time.monotonic()
        _run(setting, {"data": str(data), "run_dir": str(run_dir), "seed": seed, "num_steps": options.steps})
        line = {"setting": setting.name, "seed": seed, **found_in(run_dir), "wall_s": round(time.monotonic() - began_s, 1)}
        acted += bool(line["acted"])
        print(json.dumps(line), flush=True)
    print(f"{options.runs} healthy runs of {options.steps} steps: {acted} were acted on")
    return 1 if acted else 0


def config_of(setting: Setting, *, data: str, run_dir: str, seed: int, num_steps: int) -> RunConfig:
    shares = {"code": 1.0 - setting.digits, "digits": setting.digits}
    config = RunConfig(
        run=RunSection(name="clean", dir=run_dir, seed=seed),
        data=DataSection(path=data, seq_len=64, sources=tuple(SourceSection(name=name, weight=share) for name, share in shares.items())),
        model=ModelSection(num_layers=2, d_model=64, num_heads=4),
        train=TrainSection(num_steps=num_steps, global_batch_size=12, micro_batch_size=2, eval_interval_steps=0, eval_num_samples=32),
        optimizer=OptimizerSection(lr=3e-3),
        schedule=ScheduleSection(kind="wsd", warmup_steps=50),
        parallel=ParallelSection(dp_replicate=setting.num_ranks),
        checkpoint=CheckpointSection(interval_steps=200, prove=False, tiers=("disk",)),
        monitor=MonitorSection(log_interval_steps=100_000),
        launch=LaunchSection(threads_per_rank=1),
    )
    changes = {name: dict(values) for name, values in setting.changes.items()}
    if "dp_shard" in changes.get("parallel", {}):
        changes["parallel"]["dp_replicate"] = 1
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in changes.items()})


def train(config: RunConfig, *, rounded: bool = False) -> None:
    """Collective over the world. A run to its end; SystemExit where it leaves before."""
    with open_run(config) as (parts, guard):
        if rounded:
            round_products(parts.cut.module)
        guard.restore()
        while guard.begin():
            train_step(parts, guard)


def round_products(model: nn.Module) -> None:
    """Every linear layer of `model` works on operands rounded to bfloat16, gradients too. Sums stay in float32, as on a GPU."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(_rounded)


def _rounded(module: nn.Module, given: tuple[torch.Tensor, ...], _out: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return F.linear(given[0].bfloat16().float(), weight.bfloat16().float())


def prepare_sources(folder: Path, *, code: str = "builtin:python-stdlib") -> Path:
    """Python's own library, or other files, and numbers: no source is like the other. Prepared once."""
    out = folder / "data"
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        digits = folder / "digits.jsonl"
        lines = (" ".join(str(place * place % 99991) for place in range(start, start + 300)) for start in range(0, 300_000, 300))
        digits.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        files = {"code": code, "digits": str(digits)}
        sources = [SourceSection(name=name, files=(path,)) for name, path in files.items()]
        prepare(sources, out=out, tokenizer="bytes", heldout_fraction=0.02)
    return out


def found_in(run_dir: Path) -> dict[str, Any]:
    """What the ledger says of a run: `acted` are the events that changed it, `told` the findings that only said something."""
    entries = read_ledger(run_dir / "ledger.jsonl")
    losses = [row["loss"] for row in read_steps(run_dir, newest=50).to_pylist()]
    return {
        "steps": max((entry.step for entry in entries), default=0),
        "loss": round(sum(losses) / max(1, len(losses)), 4),
        "acted": acted_on(entries),
        "told": dict(Counter(entry.rule for entry in entries if entry.event == Event.ANOMALY_FOUND)),
    }


def acted_on(entries: Sequence[LedgerEntry]) -> list[str]:
    return [f"step {entry.step}: {entry.event} {entry.rule}".rstrip() for entry in entries if entry.event in ACTED]


def _named(name: str) -> Setting:
    return next(setting for setting in SETTINGS if setting.name == name)


def _run(setting: Setting, config: Mapping[str, Any]) -> None:
    """All ranks of one run as processes of their own."""
    told = json.dumps({"setting": setting.name, "config": dict(config)})
    size = str(setting.num_ranks)
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as listener:  # handed over: a port that was only looked up may be taken by then
        for rank in range(setting.num_ranks):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
            env |= {"SUREFOOT_LISTEN_FD": str(listener.fileno())} if setting.num_ranks > 1 else {}
            command = [sys.executable, "-m", "benchmarks.clean_runs", "--rank-of", told]
            fds = (listener.fileno(),) if rank == 0 else ()
            ranks.append(subprocess.Popen(command, env=os.environ | env, stderr=subprocess.PIPE, text=True, pass_fds=fds))
    errors = [rank.communicate()[1] for rank in ranks]
    if any(rank.returncode not in (0, 6) for rank in ranks):  # a pause is counted, anything else is no run
        raise SystemExit(f"{setting.name} failed: {errors[0][-2000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
