"""Reductions of one unit run while the backward of another computes: read off a profiler trace of two ranks."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from surefoot.core.sections import ModelSection, ParallelSection
from surefoot.model.loss import loss_of
from surefoot.parallel.gauges import Gauges
from surefoot.parallel.reductions import Reductions
from surefoot.parallel.running import Sequential
from surefoot.parallel.sharded import shard
from surefoot.tensors.batch import Batch
from tests.ranks.cutting import cut_model, world_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
SECTION = ModelSection(num_layers=3, d_model=128, num_heads=2)
NUM_UNITS = 4
MICRO_STEPS = 3
SEQ_LEN = 64

overlap_of = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "overlap.py"))["overlap_of"]


def runner_here(parallel: ParallelSection, *, world_size: int) -> tuple[torch.nn.Module, Sequential]:
    model_cut = cut_model(SECTION, parallel, world=world_of(world_size), vocab_size=256)
    assert isinstance(model_cut.runner, Sequential)
    return model_cut.module, model_cut.runner


def atoms_of(rank: int) -> list[Batch]:
    positions_BS = torch.arange(SEQ_LEN).expand(2, SEQ_LEN)
    zeros_BS = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    made = []
    for index in range(MICRO_STEPS):
        tokens_BS = torch.randint(0, 256, (2, SEQ_LEN), generator=torch.Generator().manual_seed(10 * rank + index))
        made.append(Batch(tokens_BS, tokens_BS, positions_BS, zeros_BS, zeros_BS[:, 0], num_live_tokens=2 * SEQ_LEN, atom=index))
    return made


def trace(*, rank: int, world_size: int, folder: Path, waits: bool) -> None:
    """Without `reductions` nobody lets a reduction go on, so each is waited for where it is begun: the control."""
    _, runner = runner_here(ParallelSection(dp_shard=2), world_size=world_size)
    if waits:
        runner = replace(runner, reductions=None)
    runner.run(atoms_of(rank), start=lambda _: None, loss=loss_of)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        runner.run(atoms_of(rank), start=lambda _: None, loss=loss_of)
    profiled.export_chrome_trace(str(folder / f"{rank}.json"))


@pytest.mark.parametrize("waits", [False, True])
def test_reductions_of_a_unit_run_while_the_backward_of_another_computes(run_ranks: RunRanks, tmp_path: Path, waits: bool) -> None:
    run_ranks(trace, 2, folder=tmp_path, waits=waits)
    for rank in range(2):
        found = overlap_of(json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"])
        assert found.num_reductions == MICRO_STEPS * NUM_UNITS
        # The backward of a unit is over before its reduction begins: what computes beside it is another's.
        assert (found.hidden == 0) if waits else (found.hidden > 0)


def gradients(*, rank: int, world_size: int, stage: Any, waits: bool) -> list[torch.Tensor]:
    """Shards after two steps without clearing between them: results are added to gradients that are there."""
    module, runner = runner_here(ParallelSection(dp_shard=2, zero_stage=stage), world_size=world_size)
    if waits:
        runner = replace(runner, reductions=None)
    for _ in range(2):
        runner.run(atoms_of(rank), start=lambda _: None, loss=loss_of)
    found = [parameter.grad for parameter in module.parameters()]
    return [gradient.to_local() if isinstance(gradient, DTensor) else torch.as_tensor(gradient) for gradient in found]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_reduction_that_goes_on_changes_no_bit(run_ranks: RunRanks, stage: int) -> None:
    going_on = run_ranks(gradients, 2, stage=stage, waits=False)
    waited_for = run_ranks(gradients, 2, stage=stage, waits=True)
    for ours, theirs in zip(going_on, waited_for, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class Twice(torch.nn.Module):
    """Goes through its one block two times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 256)

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = torch.nn.functional.one_hot(tokens_BS % 16, 16).float()
        return torch.as_tensor(self.head(self.block(self.block(x_BSD).relu()).relu()))


def gradients_of_twice(*, rank: int, world_size: int, waits: bool) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = Twice()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    root = shard(model, [model.block], mesh=mesh)
    reductions = None if waits else Reductions(root, gauges=Gauges(device=CPU))
    Sequential(model, CPU, nullcontext(), reduces_each_micro_step=True, reductions=reductions).run(
        atoms_of(rank), start=lambda _: None, loss=loss_of
    )
    return [parameter.grad.to_local() for parameter in model.parameters() if isinstance(parameter.grad, DTensor)]


def test_a_unit_that_is_used_twice_is_reduced_twice(run_ranks: RunRanks) -> None:
    going_on, waited_for = (run_ranks(gradients_of_twice, 2, waits=waits) for waits in (False, True))
    for ours, theirs in zip(going_on, waited_for, strict=True):
        assert len(ours) == 4
        assert all(torch.equal(one, other) and one.abs().sum() > 0 for one, other in zip(ours, theirs, strict=True))
