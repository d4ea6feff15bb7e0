"""A slow rank of our own loop, on real ranks whose steps are equally long: it is named by what it does outside collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.events import Event
from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    LaunchSection,
    ModelSection,
    ParallelSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from surefoot.observe.ledger import read_ledger
from surefoot.train.loop import open_run
from surefoot.train.step import train_step

RunRanks = Callable[..., list[Any]]


def train(*, rank: int, world_size: int, config: RunConfig, slow: int) -> list[float]:
    with open_run(config) as (parts, guard):
        guard.restore()
        nap_s = 0.13 if rank == slow else 0.1
        parts.cut.module.register_forward_pre_hook(lambda *_: time.sleep(nap_s))
        times_s = []
        while guard.begin():
            times_s.append(train_step(parts, guard).step_s)
        return times_s


def config_of(data_dir: Path, run_dir: Path, *, layout: str, num_steps: int) -> RunConfig:
    return RunConfig(
        run=RunSection(name="slow", dir=str(run_dir)),
        data=DataSection(path=str(data_dir), seq_len=32),
        model=ModelSection(num_layers=1, d_model=32, num_heads=2),
        train=TrainSection(num_steps=num_steps, global_batch_size=2, micro_batch_size=1, eval_interval_steps=0, eval_num_samples=1),
        parallel=ParallelSection(dp_shard=2) if layout == "dp_shard" else ParallelSection(dp_replicate=2),
        checkpoint=CheckpointSection(interval_steps=1000),
        launch=LaunchSection(threads_per_rank=1),
    )


@pytest.mark.parametrize("layout", ["dp_shard", "dp_replicate"])
def test_the_slow_rank_is_named_within_20_steps(run_ranks: RunRanks, data_dir: Path, tmp_path: Path, layout: str) -> None:
    config = config_of(data_dir, tmp_path / "run", layout=layout, num_steps=21)
    run_ranks(train, 2, init=False, config=config, slow=1)
    found = [entry for entry in read_ledger(tmp_path / "run" / "ledger.jsonl") if entry.event == Event.STRAGGLER_FOUND]
    assert [(entry.fields["rank"], entry.fields["cause"]) for entry in found] == [(1, "compute")]
    assert found[0].step <= 20


@pytest.mark.campaign
def test_200_clean_steps_name_nobody(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    config = config_of(data_dir, tmp_path / "run", layout="dp_shard", num_steps=200)
    run_ranks(train, 2, timeout_s=240.0, init=False, config=config, slow=-1)
    assert not [entry for entry in read_ledger(tmp_path / "run" / "ledger.jsonl") if entry.event == Event.STRAGGLER_FOUND]
