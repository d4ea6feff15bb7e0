"""Exact sums on real ranks: one hash for every layout, and a control that shows another one as soon as the grid is off.

The hash covers what a sum over atoms and ranks can reach: every float64 total before its cast, losses, norms, the digest of the end. A hash
of the weights alone proves little: a toy's float32 weights often agree although its float64 totals differ.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
from surefoot.observe.ledger import read_ledger
from surefoot.parallel import exact
from surefoot.parallel.exact import ExactRunner
from surefoot.train.loop import open_run
from surefoot.train.step import train_step

RunRanks = Callable[..., list[Any]]

NUM_STEPS = 8


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = tmp_path_factory.mktemp("text")
    for index in range(60):
        (text / f"{index:02d}.txt").write_text(f"document {index}: " + "the quick brown fox jumps over the lazy dog. " * (index % 7 + 1))
    out = text / "prepared"
    prepare([SourceSection(name="text", files=(str(text),))], out=out, tokenizer="bytes", heldout_fraction=0.1)
    return out


class Spread(nn.Module):
    """Drops, ties its embedding, has one-element and unused parameters, and each sample's gradient is scaled by up to 2^40: sums of such
    addends show every change of their order."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 17)
        self.blocks = nn.ModuleList(nn.Linear(17, 17) for _ in range(2))
        self.drop = nn.Dropout(0.25)
        self.temperature = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = x_BSD + self.drop(torch.tanh(block(x_BSD)))
        logits_BSV = nn.functional.linear(x_BSD, self.embed.weight) * self.temperature
        power_B = (tokens_BS.sum(dim=1) % 41 - 40).to(logits_BSV.dtype)
        return torch.as_tensor(_Scaled.apply(logits_BSV, torch.exp2(power_B)[:, None, None]))  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    """Identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0], None


def build_spread(section: ModelSection, vocab_size: int) -> nn.Module:
    return Spread(vocab_size)


def config_of(data_dir: Path, run_dir: Path, parallel: ParallelSection, **parts: Any) -> RunConfig:
    return RunConfig(
        run=RunSection(name="test", dir=str(run_dir), seed=11),
        data=DataSection(path=str(data_dir), seq_len=24),
        model=parts.get("model", ModelSection(factory="spread_model:build_spread")),
        train=TrainSection(
            num_steps=parts.get("num_steps", NUM_STEPS),
            global_batch_size=20,
            micro_batch_size=2,
            batch_ramp=((0, 6), (12, 14), (26, 20)),
            eval_interval_steps=4,
            eval_num_samples=6,
        ),
        optimizer=OptimizerSection(max_grad_norm=parts.get("max_grad_norm", 0.5), lr=3e-3, kernel="foreach"),
        schedule=ScheduleSection(kind="constant", warmup_steps=2),
        parallel=parallel,
        numerics=NumericsSection(sums="exact"),
        checkpoint=CheckpointSection(interval_steps=2),
        launch=LaunchSection(threads_per_rank=1),
    )


@dataclass
class Told:
    """What one process says about its steps: figures, and for each step the sum of a hash of every element of every total on this rank."""

    figures: list[str] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)


def mixed(total: torch.Tensor) -> int:
    """A hash of the elements' bits that adds up over shards in any order, and to which zeros, such as padding, add nothing."""
    bits = total.detach().contiguous().view(torch.int64)
    bits = (bits ^ (bits >> 29)) * 0x1F2D3C4B5A697887
    bits = (bits ^ (bits >> 32)) * 0x3C79AC492BA7B653
    return int((bits ^ (bits >> 31)).sum())


def train(*, rank: int, world_size: int, config: RunConfig, stop_step: int = 0, grid: bool = True) -> Told:
    """`grid` off leaves everything as it is but the rounding."""
    sys.modules["spread_model"] = sys.modules[__name__]
    if not grid:
        vars(exact)["round_to_grid"] = lambda values, *, exponent: values
    told = Told()
    with open_run(config) as (parts, guard):
        runner = parts.cut.runner
        assert isinstance(runner, ExactRunner)
        counts = parts.cut.place.coordinates["dp_replicate"] == 0
        runner.watch_totals(lambda totals: told.totals.append(sum(map(mixed, totals)) * counts))
        guard.restore()
        while guard.begin():
            report = train_step(parts, guard)
            told.figures.append(struct.pack(">dddd", report.loss, report.grad_norm, report.clip_scale, report.val_loss or 0.0).hex())
            if report.step == stop_step:
                break
        if stop_step:
            guard.close()
    return told


def hash_of(told: list[Told], digest: str) -> str:
    """Of all ranks: their figures must be the same, their totals are added."""
    assert all(one.figures == told[0].figures for one in told)
    totals = [sum(step) % 2**64 for step in zip(*(one.totals for one in told), strict=True)]
    print([f[:32] for f in told[0].figures[:4]], totals[:4], digest)
    return hashlib.sha256(repr((told[0].figures, totals, digest)).encode()).hexdigest()[:16]


def ledgered_digest(run_dir: Path) -> str:
    return str(read_ledger(run_dir / "ledger.jsonl")[-1].fields["state_digest"])


LAYOUTS = {
    "alone": ParallelSection(),
    "ddp-2": ParallelSection(dp_replicate=2),
    "ddp-3": ParallelSection(dp_replicate=3),
    "fsdp-2": ParallelSection(dp_shard=2),
    "fsdp-3-zero-1": ParallelSection(dp_shard=3, zero_stage=1),
    "fsdp-3-zero-2": ParallelSection(dp_shard=3, zero_stage=2),
    "fsdp-3": ParallelSection(dp_shard=3),
    "fsdp-4": ParallelSection(dp_shard=4),
    "hsdp-2x2": ParallelSection(dp_replicate=2, dp_shard=2),
}


def hash_under(layout: str, run_ranks: RunRanks, data_dir: Path, run_dir: Path, *, grid: bool = True, **parts: Any) -> str:
    parallel = LAYOUTS[layout]
    config = config_of(data_dir, run_dir, parallel, **parts)
    told = run_ranks(train, parallel.num_ranks, 110, init=False, config=config, grid=grid)
    return hash_of(told, ledgered_digest(run_dir))


def test_smoke(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    hashes = {}
    for layout in LAYOUTS:
        print(layout)
        hashes[layout] = hash_under(layout, run_ranks, data_dir, tmp_path / layout)
        print(hashes)
    off = {
        layout: hash_under(layout, run_ranks, data_dir, tmp_path / f"{layout}-off", grid=False) for layout in ("alone", "fsdp-2", "ddp-3")
    }
    print(hashes, off)
    assert len(set(hashes.values())) == 1
