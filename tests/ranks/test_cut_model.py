"""Our model cut over real ranks: the sum of its gradients is the single process's, also where one rank has only phantoms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from surefoot.core.sections import ModelSection, ParallelSection
from surefoot.model.build import build_model, materialise
from surefoot.model.loss import loss_of, loss_sum
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch
from tests.ranks.cutting import cut_model, world_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
VOCAB_SIZE = 100
SAMPLES = 3  # three atoms on two ranks: rank 1 has a phantom in its second micro-step


def atom(index: int) -> Batch:
    shape = (1, 12)
    tokens_BS = torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(index))
    live = index < SAMPLES
    return Batch(
        tokens_BS=tokens_BS if live else torch.zeros_like(tokens_BS),
        labels_BS=tokens_BS.roll(-1, dims=1) if live else torch.full(shape, IGNORED_LABEL),
        positions_BS=torch.arange(12).expand(shape),
        doc_ids_BS=torch.zeros(shape, dtype=torch.int64),
        sample_ids_B=torch.tensor([index if live else PHANTOM_SAMPLE]),
        num_live_tokens=12 if live else 0,
        atom=index,
    )


def gradients_on_ranks(*, rank: int, world_size: int, section: ModelSection, parallel: ParallelSection) -> None:
    model_cut = cut_model(section, parallel, world=world_of(world_size), vocab_size=VOCAB_SIZE)
    atoms = [atom(micro_step * world_size + rank) for micro_step in range(2)]
    assert model_cut.runner.run(atoms, start=lambda _: None, loss=loss_of).item() > 0

    reference = build_model(section, VOCAB_SIZE, seed=4)
    materialise(reference, seed=4, device=CPU)
    for index in range(SAMPLES):
        torch.autograd.backward(loss_sum(reference, atom(index)).objective)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model_cut.module.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(grad, wanted[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("parallel", [ParallelSection(dp_replicate=2), ParallelSection(dp_shard=2)], ids=["replicated", "sharded"])
def test_gradients_are_those_of_one_process(run_ranks: RunRanks, parallel: ParallelSection, tied: bool) -> None:
    section = ModelSection(num_layers=2, d_model=24, num_heads=2, d_ff=20, init_std=0.1, tie_embeddings=tied)
    run_ranks(gradients_on_ranks, 2, section=section, parallel=parallel)
