"""Exact sums on real ranks: one hash for every layout, and a control that shows another one as soon as the grid is off.

The hash covers what a sum over atoms and ranks can reach: every float64 total before its cast, losses, norms, the digest of the end. A hash
of the weights alone proves little: a toy's float32 weights often agree although its float64 totals differ.
"""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import parse_id
from surefoot.core.events import Event
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
    TrainSection,
)
from surefoot.model.loss import LossSums, loss_of
from surefoot.observe.ledger import read_ledger
from surefoot.parallel import exact
from surefoot.parallel.exact import ExactRunner
from surefoot.tensors.batch import Batch
from surefoot.tensors.grid import LOWEST_EXPONENT
from surefoot.train import step
from surefoot.train.loop import open_run
from surefoot.train.step import train_step

RunRanks = Callable[..., list[Any]]

NUM_STEPS = 8


class Spread(nn.Module):
    """Drops, ties its embedding, has one-element and unused parameters."""

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
        return logits_BSV


def spread_loss(logits_BSV: torch.Tensor, atom: Batch, *, z_loss: float = 0.0, scale: float = 1.0) -> LossSums:
    """The objective of each atom is scaled by up to 2^-40: sums of such gradients show every change of their order."""
    sums = loss_of(logits_BSV, atom, z_loss=z_loss, scale=scale)
    return LossSums(nats=sums.nats, objective=sums.objective * 2.0 ** -(int(atom.tokens_BS.sum()) % 41))


def build_spread(section: ModelSection, vocab_size: int) -> nn.Module:
    return Spread(vocab_size)


def config_of(data_dir: Path, run_dir: Path, parallel: ParallelSection, **parts: Any) -> RunConfig:
    return RunConfig(
        run=RunSection(name="test", dir=str(run_dir), seed=11),
        data=DataSection(path=str(data_dir), seq_len=24),
        model=parts.get("model", DROPPING),
        train=TrainSection(
            num_steps=parts.get("num_steps", NUM_STEPS),
            global_batch_size=20,
            micro_batch_size=2,
            batch_ramp=((0, 6), (12, 14), (26, 20)),
            eval_interval_steps=4,
            precision=parts.get("precision", "fp32"),
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


def train(
    *, rank: int, world_size: int, config: RunConfig, leave_at: int = 0, crash_at: int = 0, grid: bool = True, lost_units_at: int = 0
) -> Told:
    """`leave_at` ends the process in order after that step, `crash_at` at once after it. `grid` off leaves all as it is but the rounding.

    Before step `lost_units_at` + 1 the units are made as fine as they get, so that everything overflows.
    """
    sys.modules["spread_model"] = sys.modules[__name__]
    vars(step)["loss_of"] = spread_loss  # the loss of our step is no setting
    if not grid:
        vars(exact)["round_to_grid"] = lambda values, *, exponent: values
    told = Told()
    try:
        with open_run(config) as (parts, guard):
            runner, sums = parts.cut.runner, parts.cut.exact_sums
            assert isinstance(runner, ExactRunner)
            assert sums is not None
            counts = parts.cut.place.coordinates["dp_replicate"] == 0
            runner.watch_totals(lambda totals: told.totals.append(sum(map(mixed, totals)) * counts))
            guard.restore()
            while guard.begin():
                if lost_units_at and guard.step == lost_units_at:
                    sums.load_state_dict({"exponents": dict.fromkeys(sums.state_dict()["exponents"], LOWEST_EXPONENT)})
                report = train_step(parts, guard)
                figures = (report.loss, report.grad_norm, report.clip_scale, report.val_loss or 0.0)
                told.figures.append(struct.pack(">dddd", *figures).hex())
                if rank == 0 and report.step + 1 == leave_at:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if report.step == crash_at:
                    await_published(Path(config.run.dir), saved=crash_at - 1)
                    os._exit(0)
    except SystemExit:
        assert leave_at
    return told


def await_published(run_dir: Path, *, saved: int) -> None:
    """The save of that step goes on beside the loop: a crash before its commit would lose it."""
    deadline_s = time.monotonic() + 30
    while not any(parsed and parsed[0] == saved for parsed in map(parse_id, published(run_dir / "checkpoints"))):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@dataclass(frozen=True)
class Seen:
    """Of a whole run: figures of each step, the totals of each step over all ranks, the digest of the end."""

    figures: tuple[str, ...]
    totals: tuple[int, ...]
    digest: str

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def run_under(layout: str, run_ranks: RunRanks, data_dir: Path, run_dir: Path, **parts: Any) -> Seen:
    how = {name: parts.pop(name) for name in ("grid", "leave_at", "lost_units_at") if name in parts}
    config = config_of(data_dir, run_dir, LAYOUTS[layout], **parts)
    told = run_ranks(train, config.parallel.num_ranks, 110, init=False, config=config, **how)
    assert all(one.figures == told[0].figures for one in told)
    totals = tuple(sum(step) % 2**64 for step in zip(*(one.totals for one in told), strict=True))
    return Seen(tuple(told[0].figures), totals, str(read_ledger(run_dir / "ledger.jsonl")[-1].fields.get("state_digest", "")))


LAYOUTS = {
    "alone": ParallelSection(),
    "ddp-2": ParallelSection(dp_replicate=2),
    "ddp-3": ParallelSection(dp_replicate=3),
    "fsdp-2": ParallelSection(dp_shard=2),
    "fsdp-3": ParallelSection(dp_shard=3),
    "fsdp-3-zero-1": ParallelSection(dp_shard=3, zero_stage=1),
    "fsdp-3-zero-2": ParallelSection(dp_shard=3, zero_stage=2),
    "fsdp-4": ParallelSection(dp_shard=4),
    "hsdp-2x2": ParallelSection(dp_replicate=2, dp_shard=2),
    "pp-2": ParallelSection(pp=2),
    "pp-2-interleaved": ParallelSection(pp=2, pp_schedule="interleaved"),
    "pp-2-fsdp-2": ParallelSection(pp=2, dp_shard=2),
    "pp-2-ddp-2-interleaved": ParallelSection(pp=2, dp_replicate=2, pp_schedule="interleaved"),
    "fsdp-2-selective": ParallelSection(dp_shard=2, recompute="selective"),
    "fsdp-3-full": ParallelSection(dp_shard=3, recompute="full"),
}
"""10 atoms in the largest step: on 3 and 4 ranks some micro-step has phantoms."""

DROPPING = ModelSection(factory="spread_model:build_spread")
OURS = ModelSection(num_layers=4, d_model=24, num_heads=2, d_ff=20, init_std=0.1, tie_embeddings=False)


def table(hashes: dict[str, str]) -> str:
    return "\n".join(f"{layout:<24} {value}" for layout, value in hashes.items())


def test_every_data_layout_gives_one_hash(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    layouts = ("alone", "ddp-2", "fsdp-2", "fsdp-3-zero-1", "fsdp-4", "hsdp-2x2")
    hashes = {layout: run_under(layout, run_ranks, data_dir, tmp_path / layout).hash for layout in layouts}
    assert len(set(hashes.values())) == 1, table(hashes)


@pytest.mark.parametrize(("layout", "model"), [("ddp-3", DROPPING), ("pp-2-fsdp-2", OURS)], ids=["ddp-3", "pp-2-fsdp-2"])
def test_with_the_grid_off_the_totals_of_another_layout_differ(
    layout: str, model: ModelSection, run_ranks: RunRanks, data_dir: Path, tmp_path: Path
) -> None:
    """The control: what is equal above is not equal by itself, so the hash sees a lost rounding."""
    alone, other = (
        run_under(name, run_ranks, data_dir, tmp_path / name, grid=False, num_steps=5, model=model) for name in ("alone", layout)
    )
    assert alone.totals != other.totals


def test_the_stages_of_a_pipeline_and_recomputed_blocks_give_the_same_hash(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    layouts = ("alone", "pp-2-interleaved", "pp-2-fsdp-2", "fsdp-2-selective")
    hashes = {layout: run_under(layout, run_ranks, data_dir, tmp_path / layout, model=OURS).hash for layout in layouts}
    assert len(set(hashes.values())) == 1, table(hashes)


def test_a_run_that_changes_its_ranks_on_the_way_gives_the_same_hash(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    undisturbed = run_under("ddp-2", run_ranks, data_dir, tmp_path / "undisturbed")
    figures: tuple[str, ...] = ()
    totals: tuple[int, ...] = ()
    for layout, leave_at in (("hsdp-2x2", 2), ("fsdp-3", 4), ("alone", 6), ("fsdp-2", 0)):
        part = run_under(layout, run_ranks, data_dir, tmp_path / "changing", leave_at=leave_at)
        figures, totals = figures + part.figures, totals + part.totals
    assert Seen(figures, totals, part.digest) == undisturbed


def test_a_resume_on_another_number_of_ranks_is_verified_by_bits(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(AssertionError, match="died"):
        run_ranks(train, 3, init=False, config=config_of(data_dir, run_dir, LAYOUTS["ddp-3"]), crash_at=5)
    run_under("fsdp-2", run_ranks, data_dir, run_dir)
    ledger = read_ledger(run_dir / "ledger.jsonl")
    (verified,) = [entry for entry in ledger if entry.event == Event.REPLAY_VERIFIED]
    assert (verified.fields["mode"], verified.fields["num_steps"]) == ("bits", 1)
    assert not [entry for entry in ledger if entry.event in (Event.ENVIRONMENT_CHANGED, Event.REPLAY_DIFFERED)]


def test_a_step_whose_gradients_overflow_is_computed_again_alike_on_every_layout(
    run_ranks: RunRanks, data_dir: Path, tmp_path: Path
) -> None:
    one, other = (run_under(layout, run_ranks, data_dir, tmp_path / layout, lost_units_at=2, num_steps=4) for layout in ("fsdp-2", "ddp-3"))
    assert one == other
    redone = [entry for entry in read_ledger(tmp_path / "ddp-3" / "ledger.jsonl") if entry.event == Event.STEP_REDONE]
    # the first step of the run has no units yet: it measures them, and that is no event
    assert [(entry.step, entry.rule) for entry in redone] == [(3, "grid_overflow")]
    assert "grew past its grid" in redone[0].reason
    assert len(one.totals) == 4  # only what was accepted is shown


class Twice(nn.Module):
    """Its one unit is entered twice in each forward."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, vocab_size)

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        block = self.blocks[0]
        return torch.as_tensor(self.head(block(torch.tanh(block(self.embed(tokens_BS))))))


def build_twice(section: ModelSection, vocab_size: int) -> nn.Module:
    return Twice(vocab_size)


def test_a_unit_that_a_forward_enters_twice_is_refused_by_name_where_it_is_sharded(
    run_ranks: RunRanks, data_dir: Path, tmp_path: Path
) -> None:
    model = ModelSection(factory="spread_model:build_twice")
    run_under("alone", run_ranks, data_dir, tmp_path / "alone", model=model, num_steps=1)
    with pytest.raises(AssertionError, match=r"the gradient of blocks\.0 was reduced twice in a step"):
        run_under("fsdp-2", run_ranks, data_dir, tmp_path / "sharded", model=model, num_steps=1)


@pytest.mark.campaign  # products of bf16 matrices are slow on many CPUs
def test_in_bf16_every_layout_gives_one_hash_too(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"precision": "bf16", "model": OURS}
    layouts = ("alone", "ddp-2", "fsdp-3", "pp-2-interleaved")
    hashes = {layout: run_under(layout, run_ranks, data_dir, tmp_path / layout, **parts).hash for layout in layouts}
    assert len(set(hashes.values())) == 1, table(hashes)
    assert run_under("alone", run_ranks, data_dir, tmp_path / "fp32", model=OURS).hash not in hashes.values()


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [DROPPING, OURS], ids=["dropout-tied", "transformer"])
def test_all_layouts_over_50_steps(model: ModelSection, run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    """Prints the table: layout, hash."""
    ours_only = [layout for layout, parallel in LAYOUTS.items() if parallel.pp > 1 or parallel.recompute != "none"]
    parts: dict[str, Any] = {"num_steps": 50, "model": model}
    hashes, off = {}, {}
    for layout in LAYOUTS:
        if model is OURS or layout not in ours_only:
            hashes[layout] = run_under(layout, run_ranks, data_dir, tmp_path / layout, **parts).hash
    for layout in ("alone", "ddp-3", "fsdp-4"):
        off[f"{layout}, grid off"] = run_under(layout, run_ranks, data_dir, tmp_path / f"{layout}-off", grid=False, **parts).hash
    print(f"\n{table(hashes | off)}")
    assert len(set(hashes.values())) == 1
    assert len(set(off.values())) == 3
