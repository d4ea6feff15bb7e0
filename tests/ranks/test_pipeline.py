"""A pipeline against one process on the same samples: losses, norms and weights; what each rank holds and sends."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from surefoot.core.sections import ModelSection, OptimizerSection, ParallelSection
from surefoot.guard.counting import agree_dealt
from surefoot.model.build import build_model
from surefoot.model.loss import loss_of
from surefoot.monitor.gradients import counted_gradients, squared_norm_and_nonfinite
from surefoot.parallel.clip import scale_gradients
from surefoot.parallel.cut import Cut
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch
from surefoot.tensors.world import World, told_apart
from surefoot.train.optimizers import build_optimizer
from tests.ranks.cutting import cut_model, world_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
VOCAB_SIZE = 96
SHAPE = (2, 12)
ATOMS_PER_STEP = (5, 3, 7, 1, 6)
"""Uneven, growing and shrinking; one is fewer than any pipeline has stages."""


def atom_of(step: int, index: int) -> Batch:
    """Atoms from the number of the step on are phantoms."""
    stream = torch.Generator().manual_seed(1000 * step + index)
    tokens_BS = torch.randint(0, VOCAB_SIZE, SHAPE, generator=stream)
    live = index < ATOMS_PER_STEP[step]
    return Batch(
        tokens_BS=tokens_BS if live else torch.zeros_like(tokens_BS),
        labels_BS=tokens_BS.roll(-1, dims=1) if live else torch.full(SHAPE, IGNORED_LABEL),
        positions_BS=torch.arange(SHAPE[1]).expand(SHAPE),
        doc_ids_BS=(torch.arange(SHAPE[1]) >= 7).long().expand(SHAPE),
        sample_ids_B=torch.full(SHAPE[:1], index if live else PHANTOM_SAMPLE),
        num_live_tokens=math.prod(SHAPE) if live else 0,
        atom=index,
    )


def atoms_of(step: int, *, data_rank: int, num_data_ranks: int) -> list[Batch]:
    num_micro_steps = -(-ATOMS_PER_STEP[step] // num_data_ranks)
    return [atom_of(step, micro_step * num_data_ranks + data_rank) for micro_step in range(num_micro_steps)]


def cut_here(section: ModelSection, parallel: ParallelSection, dtype: torch.dtype, *, world: World) -> Cut:
    return cut_model(section, parallel, world=world, vocab_size=VOCAB_SIZE, dtype=dtype)


def train(
    *, rank: int, world_size: int, section: ModelSection, parallel: ParallelSection, dtype: torch.dtype, num_steps: int
) -> list[tuple[float, float]]:
    """(loss, norm before clipping) of each step, and of the held-out atoms at the end."""
    world = world_of(world_size)
    made = cut_here(section, parallel, dtype, world=world)
    parameters = list(made.module.parameters())
    optimizer = build_optimizer(made.module, OptimizerSection(lr=0.01))
    dealt = agree_dealt(made.module, optimizer, world=world)
    told = []
    for step in range(num_steps):
        atoms = atoms_of(step, data_rank=made.place.data_rank, num_data_ranks=made.place.num_data_ranks)
        started: list[int] = []
        nats = made.runner.run(atoms, start=lambda atom: started.append(atom.atom), loss=partial(loss_of, z_loss=1e-3))  # noqa: B023
        assert set(started) == {atom.atom for atom in atoms}
        gradients = counted_gradients(parameters, rank=rank, world_size=world_size, dealt=dealt)
        squared, _ = squared_norm_and_nonfinite(gradients, device=CPU)
        sums = torch.stack((nats if made.place.counts_loss else torch.zeros_like(nats), squared))
        if world_size > 1:
            dist.all_reduce(sums)
        num_tokens = ATOMS_PER_STEP[step] * math.prod(SHAPE)
        loss, norm = float(sums[0]) / num_tokens, math.sqrt(float(sums[1])) / num_tokens
        scale_gradients(parameters, min(1.0, 0.5 / norm) / num_tokens)
        optimizer.step()
        optimizer.zero_grad()
        told.append((loss, norm))
    return told


SECTION = ModelSection(num_layers=4, d_model=24, num_heads=2, d_ff=20, init_std=0.1, tie_embeddings=False, qk_norm=True)
TIED = ModelSection(num_layers=4, d_model=24, num_heads=2, d_ff=20, init_std=0.1, tie_embeddings=True)

LAYOUTS = {
    "pp2": ParallelSection(pp=2),
    "interleaved": ParallelSection(pp=2, pp_schedule="interleaved"),
    "zero_bubble": ParallelSection(pp=2, pp_schedule="zero_bubble"),
    "pp4": ParallelSection(pp=4),
    "pp2-fsdp2": ParallelSection(pp=2, dp_shard=2),
    "pp2-dp2": ParallelSection(pp=2, dp_replicate=2),
}
MORE_LAYOUTS = {
    "zero_bubble-fsdp2": ParallelSection(pp=2, dp_shard=2, pp_schedule="zero_bubble"),
    "zero_bubble-dp2": ParallelSection(pp=2, dp_replicate=2, pp_schedule="zero_bubble"),
    "interleaved-fsdp2": ParallelSection(pp=2, dp_shard=2, pp_schedule="interleaved"),
    "interleaved-dp2": ParallelSection(pp=2, dp_replicate=2, pp_schedule="interleaved"),
    "three-pieces": ParallelSection(pp=2, pp_schedule="interleaved", pp_chunks=3),
    "three-pieces-zero_bubble": ParallelSection(pp=2, pp_schedule="zero_bubble", pp_chunks=3),
    "pp3": ParallelSection(pp=3),
    "stage-1": ParallelSection(pp=2, dp_shard=2, zero_stage=1),
    "stage-2": ParallelSection(pp=2, dp_shard=2, zero_stage=2),
    "full-recompute": ParallelSection(pp=2, recompute="full"),
    "selective-recompute": ParallelSection(pp=2, dp_shard=2, recompute="selective"),
    "full-recompute-interleaved": ParallelSection(pp=2, pp_schedule="interleaved", recompute="full"),
    "full-recompute-zero_bubble": ParallelSection(pp=2, pp_schedule="zero_bubble", recompute="full"),
    "tp2": ParallelSection(pp=2, tp=2),
    "tp2-interleaved": ParallelSection(pp=2, tp=2, pp_schedule="interleaved"),
    "tp2-zero_bubble": ParallelSection(pp=2, tp=2, pp_schedule="zero_bubble"),
    "cp2": ParallelSection(pp=2, cp=2),
    "cp2-interleaved": ParallelSection(pp=2, cp=2, pp_schedule="interleaved"),
    "cp2-zero_bubble": ParallelSection(pp=2, cp=2, pp_schedule="zero_bubble"),
}


def compare(told: Sequence[Sequence[tuple[float, float]]], alone: Sequence[tuple[float, float]], *, tolerance: float) -> None:
    for steps in told:
        assert steps == told[0]
    for (loss, norm), (wanted_loss, wanted_norm) in zip(told[0], alone, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=tolerance)
        assert norm == pytest.approx(wanted_norm, rel=tolerance)


@pytest.mark.parametrize(
    ("layout", "tied"), [("pp2", True), ("interleaved", False), ("zero_bubble", True), ("pp2-fsdp2", True), ("pp2-dp2", False)]
)
def test_losses_and_norms_are_those_of_one_process(run_ranks: RunRanks, layout: str, tied: bool) -> None:
    against_one_process(run_ranks, LAYOUTS[layout], tied=tied, dtype=torch.float64)


@pytest.mark.campaign
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE_LAYOUTS])
def test_losses_and_norms_of_every_pipeline(run_ranks: RunRanks, layout: str, tied: bool) -> None:
    for dtype in (torch.float64, torch.float32):
        against_one_process(run_ranks, (LAYOUTS | MORE_LAYOUTS)[layout], tied=tied, dtype=dtype)


_ALONE: dict[tuple[ModelSection, torch.dtype], list[tuple[float, float]]] = {}
"""What one process said, once for all layouts."""


def against_one_process(run_ranks: RunRanks, parallel: ParallelSection, *, tied: bool, dtype: torch.dtype) -> None:
    section = replace(TIED if tied else SECTION, num_layers=6 if parallel.pp_chunks == 3 else 4)
    num_steps, tolerance = (5, 1e-9) if dtype == torch.float64 else (3, 1e-6)
    if (section, dtype) not in _ALONE:
        (_ALONE[section, dtype],) = run_ranks(train, 1, section=section, parallel=ParallelSection(), dtype=dtype, num_steps=num_steps)
    told = run_ranks(train, parallel.num_ranks, section=section, parallel=parallel, dtype=dtype, num_steps=num_steps)
    compare(told, _ALONE[section, dtype], tolerance=tolerance)


@dataclass(frozen=True)
class Shown:
    """What one rank has, and what it did in one step of 4 micro-batches."""

    names: list[str]
    num_elements: int
    calls: dict[str, int]


def one_step(*, rank: int, world_size: int, section: ModelSection, parallel: ParallelSection) -> Shown:
    made = cut_here(section, parallel, torch.float32, world=world_of(world_size))
    atoms = [atom_of(2, index) for index in range(4)]
    made.runner.run(atoms, start=lambda _: None, loss=loss_of)  # agrees with its neighbours on what passes
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        made.runner.run(atoms, start=lambda _: None, loss=loss_of)
    parameters = dict(made.module.named_parameters())
    assert all(isinstance(parameter, DTensor) and parameter.grad is not None for parameter in parameters.values())
    return Shown(
        names=list(parameters),
        num_elements=sum(parameter.to_local().numel() for parameter in parameters.values()),  # type: ignore[attr-defined]
        calls={event.key.removeprefix("c10d::"): event.count for event in profiled.key_averages() if event.key.startswith("c10d::")},
    )


@pytest.mark.parametrize(
    ("layout", "tied", "num_sent"),
    [("pp2", True, 5), ("interleaved", False, 12), ("pp2-fsdp2", False, 4)],
)
def test_a_stage_holds_its_part_and_sends_what_passes(run_ranks: RunRanks, layout: str, tied: bool, num_sent: int) -> None:
    """4 micro-batches over one border between two stages, or three between four pieces; a tied matrix is exchanged once. Nothing else."""
    parallel, section = LAYOUTS[layout], TIED if tied else SECTION
    shown = run_ranks(one_step, parallel.num_ranks, section=section, parallel=parallel)
    whole = {name: parameter.numel() for name, parameter in build_model(section, VOCAB_SIZE, seed=4).named_parameters()}
    first, last = shown[0], shown[-1]
    assert set(first.names) | set(last.names) == whole.keys()
    assert set(first.names) & set(last.names) == ({"embed.weight"} if tied else set())
    assert sum(rank.num_elements for rank in shown) == sum(whole.values()) + tied * whole["embed.weight"]
    for rank in shown:
        assert (rank.calls.pop("send"), rank.calls.pop("recv_")) == (num_sent, num_sent)
        if parallel.dp_shard == 1:
            assert rank.calls == {}
        else:
            units = {name[:8] if name.startswith("blocks.") else name for name in rank.names}
            assert rank.calls["_reduce_scatter_base_"] == len(units)


def norm_of_stages(*, rank: int, world_size: int) -> float:
    """Somebody's own stages, without DTensors: two matrices of its own on each, and one that both have."""
    model = torch.nn.ModuleDict({f"own_{rank}": torch.nn.Linear(3, 2), "shared": torch.nn.Linear(2, 2)})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    parameters = list(model.parameters())
    dealt = agree_dealt(model, torch.optim.SGD(parameters, lr=0.1), world=world_of(world_size))
    squared, _ = squared_norm_and_nonfinite(counted_gradients(parameters, rank=rank, world_size=world_size, dealt=dealt), device=CPU)
    dist.all_reduce(squared)
    return float(squared)


def test_plain_parameters_of_stages_are_counted_once_too(run_ranks: RunRanks) -> None:
    assert run_ranks(norm_of_stages, 2) == [pytest.approx(4.0 * (2 * (6 + 2) + 4 + 2))] * 2


def run_after_a_peer_died(*, rank: int, world_size: int, parallel: ParallelSection, outcomes: Path) -> None:
    made = cut_here(SECTION, parallel, torch.float32, world=world_of(world_size))
    atoms = [atom_of(2, index) for index in range(4)]
    made.runner.run(atoms, start=lambda _: None, loss=loss_of)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        made.runner.run(atoms, start=lambda _: None, loss=loss_of)
    (outcomes / f"{rank}").write_text(type(told_apart("a step", raised.value)).__name__)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_loss_of_another_stage_is_told_from_a_fault_of_ones_own(run_ranks: RunRanks, tmp_path: Path, schedule: Any) -> None:
    """Of the stage beside, and of a rank that shares the parameters of the own one: in the middle of a forward, which torch wraps."""
    parallel = ParallelSection(pp=2, dp_shard=2, pp_schedule=schedule)
    with pytest.raises(AssertionError, match="rank 3 died"):
        run_ranks(run_after_a_peer_died, 4, parallel=parallel, outcomes=tmp_path)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"1", "2"} <= told.keys()  # rank 0 may wait for rank 2 until that one is gone too
    assert set(told.values()) == {"PeerLost"}
