"""fp16 on real ranks: gradients overflow where the scale is too large, and all ranks skip, halve and go on alike."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint.state import collect
from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    LaunchSection,
    ModelSection,
    ParallelSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TrainSection,
)
from surefoot.observe.ledger import read_ledger
from surefoot.tensors.digest import tensor_digest
from surefoot.train.loop import open_run
from surefoot.train.step import Parts, train_step
from tests.ranks.training import ledgered_digest

RunRanks = Callable[..., list[Any]]
NUM_STEPS = 16
INITIAL = 2.0**26  # above what the first gradients bear


@dataclass(frozen=True)
class Seen:
    step: int
    action: str
    scale: float
    loss: float
    grad_norm: float | None
    changed_bits: bool


def config_of(data_dir: Path, run_dir: Path, *, parallel: ParallelSection, **train: Any) -> RunConfig:
    settings = {"precision": "fp16", "fp16_initial_scale": INITIAL, "fp16_growth_interval_steps": 3, **train}
    return RunConfig(
        run=RunSection(name="test", dir=str(run_dir), seed=11),
        data=DataSection(path=str(data_dir), seq_len=32),
        model=ModelSection(num_layers=1, d_model=32, num_heads=2),
        train=TrainSection(num_steps=NUM_STEPS, global_batch_size=6, micro_batch_size=3, eval_interval_steps=0, **settings),
        schedule=ScheduleSection(kind="constant", warmup_steps=2),
        parallel=parallel,
        checkpoint=CheckpointSection(interval_steps=4),
        launch=LaunchSection(threads_per_rank=1),
    )


def train(*, rank: int, world_size: int, config: RunConfig, kill_after: int = 0) -> list[Seen]:
    """`scale` is that of the step itself."""
    seen = []
    with open_run(config) as (parts, guard):
        guard.restore()
        while guard.begin():
            scale = parts.scaler.scale if parts.scaler is not None else 1.0
            before = _bits(parts)
            report = train_step(parts, guard)
            norm = report.grad_norm if math.isfinite(report.grad_norm) else None
            seen.append(Seen(report.step, report.action, scale, report.loss, norm, _bits(parts) != before))
            if guard.step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return seen


def _bits(parts: Parts) -> dict[str, int]:
    return {key: tensor_digest(tensor) for key, tensor in collect(parts.cut.module, parts.optimizer).tensors.items()}


def test_overflows_are_skipped_alike_and_a_killed_run_ends_with_the_same_bits(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    parallel = ParallelSection(dp_shard=2)
    config = config_of(data_dir, tmp_path / "undisturbed", parallel=parallel)
    seen, other = run_ranks(train, 2, init=False, config=config)
    assert seen == other
    skipped = [step for step in seen if step.action == "skip"]
    assert len(skipped) >= 3
    assert not any(step.changed_bits for step in skipped)
    assert all(step.changed_bits for step in seen if step.action == "proceed")
    for step, following in pairwise(seen):
        assert following.scale in ((step.scale / 2,) if step.action == "skip" else (step.scale, 2 * step.scale))
    assert any(following.scale > step.scale for step, following in pairwise(seen))
    assert {entry.rule for entry in read_ledger(tmp_path / "undisturbed" / "ledger.jsonl") if entry.event == "update.skipped"} == {
        "loss_scale_backoff"
    }

    disturbed = config_of(data_dir, tmp_path / "disturbed", parallel=parallel)
    with pytest.raises(AssertionError, match="died"):
        run_ranks(train, 2, init=False, config=disturbed, kill_after=11)
    resumed, _ = run_ranks(train, 2, init=False, config=disturbed)
    assert 4 < resumed[0].step <= 12
    assert resumed == seen[resumed[0].step - 1 :]
    assert ledgered_digest(tmp_path / "disturbed") == ledgered_digest(tmp_path / "undisturbed")


def test_fp16_learns_as_fp32_does(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    """With the default scale none of its gradients overflows, and products of 11 bits move the loss by parts in a thousand."""
    defaults = {"fp16_initial_scale": 65_536.0, "fp16_growth_interval_steps": 2000}
    many, alone = ParallelSection(dp_replicate=2), ParallelSection()
    half, _ = run_ranks(train, 2, init=False, config=config_of(data_dir, tmp_path / "half", parallel=many, **defaults))
    (plain,) = run_ranks(train, 1, init=False, config=config_of(data_dir, tmp_path / "plain", parallel=alone, precision="fp32", **defaults))
    assert {step.action for step in half} == {"proceed"}
    for step, expected in zip(half, plain, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=2e-3)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=2e-2)
    assert half[-1].loss < half[0].loss - 0.1
