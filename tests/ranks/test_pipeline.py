"""What is special about a pipeline: whose gradients count, and a stage that dies. Losses, norms and collectives are in test_matrix.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surefoot.core.sections import ModelSection, ParallelSection
from surefoot.guard.counting import agree_dealt
from surefoot.model.loss import loss_of
from surefoot.monitor.gradients import counted_gradients, squared_norm_and_nonfinite
from surefoot.tensors.world import told_apart
from tests.ranks.cutting import cut_model, world_of
from tests.ranks.documents import VOCAB_SIZE, atom_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
SECTION = ModelSection(num_layers=4, d_model=24, num_heads=2, d_ff=20, init_std=0.1, tie_embeddings=False, qk_norm=True)


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
    made = cut_model(SECTION, parallel, world=world_of(world_size), vocab_size=VOCAB_SIZE)
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
