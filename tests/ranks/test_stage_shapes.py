"""Steps whose sequences have another length and another rotary base than the step before, in every way of cutting a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from surefoot.core.sections import ModelSection, ParallelSection
from surefoot.model.loss import loss_of
from surefoot.model.rope import set_rope_base
from surefoot.tensors.batch import IGNORED_LABEL, Batch
from tests.ranks.cutting import cut_model, world_of
from tests.ranks.documents import VOCAB_SIZE

RunRanks = Callable[..., list[Any]]
Figures = list[tuple[float, float]]

SECTION = ModelSection(num_layers=2, d_model=32, num_heads=4, d_ff=48, init_std=0.1, tie_embeddings=False)
STEPS = ((8, 1e4), (16, 1e4), (16, 5e5), (8, 5e5), (32, 5e5), (8, 1e4))
"""(sequence length, base) of each step, there and back again."""


def atom_of(length: int, index: int) -> Batch:
    doc_ids_BS = torch.stack([(torch.arange(length) >= split).long() for split in (length // 3, length // 2)])
    positions_BS = torch.stack([torch.cat([torch.arange(split), torch.arange(length - split)]) for split in (length // 3, length // 2)])
    tokens_BS = torch.randint(0, VOCAB_SIZE, doc_ids_BS.shape, generator=torch.Generator().manual_seed(100 * length + index))
    labels_BS = tokens_BS.roll(-1, dims=1)
    labels_BS[:, -1] = IGNORED_LABEL
    live = int((labels_BS != IGNORED_LABEL).sum())
    return Batch(tokens_BS, labels_BS, positions_BS, doc_ids_BS, torch.arange(2), num_live_tokens=live, atom=index)


def figures(*, rank: int, world_size: int, parallel: ParallelSection) -> Figures:
    """(nats of all ranks, sum of the squares of all gradients) of each step, weights untouched; between two steps an evaluation."""
    world = world_of(world_size)
    made = cut_model(SECTION, parallel, world=world, vocab_size=VOCAB_SIZE)
    place, found = made.place, []
    for length, base in STEPS:
        set_rope_base(made.module, base)
        mine = [atom_of(length, index) for index in range(4) if index % place.num_data_ranks == place.data_rank]
        nats = made.runner.run(mine, start=lambda _: None, loss=loss_of)
        nats = (nats if place.counts_loss else torch.zeros_like(nats)).clone()
        squares = torch.zeros((), dtype=torch.float64)
        for parameter in made.module.parameters():
            assert parameter.grad is not None
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            squares += whole.double().square().sum()
            parameter.grad = None
        if world_size > 1:
            torch.distributed.all_reduce(nats)
            if parallel.pp > 1:  # each stage has parameters of its own
                torch.distributed.all_reduce(squares)
        found.append((float(nats), float(squares)))
        with torch.no_grad():
            made.runner.evaluate([atom_of(8, 9)], loss=loss_of)
    return found


@pytest.fixture(scope="module")
def alone() -> Figures:
    return figures(rank=0, world_size=1, parallel=ParallelSection())


def test_length_and_base_both_matter(alone: Figures) -> None:
    assert len({nats for nats, _ in alone}) == len(STEPS) - 1
    assert alone[0] == alone[-1]


LAYOUTS = {
    "shards": ParallelSection(dp_shard=2),
    "stages": ParallelSection(pp=2, recompute="full"),
    "tensors": ParallelSection(tp=2),
    "positions": ParallelSection(cp=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_another_length_and_base_computes_what_one_process_does(run_ranks: RunRanks, alone: Figures, layout: str) -> None:
    for found in run_ranks(figures, 2, parallel=LAYOUTS[layout]):
        for (nats, squares), (nats_alone, squares_alone) in zip(found, alone, strict=True):
            assert nats == pytest.approx(nats_alone, rel=1e-6)
            assert squares == pytest.approx(squares_alone, rel=1e-4)
