"""Layers cut over real ranks, along heads, features, vocabulary and positions: what each starts from, bf16, and who is refused.

Losses, norms, and what a rank holds and sends are in test_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ModelSection, ParallelSection
from surefoot.model.build import build_model, cut_plan, materialise
from surefoot.model.loss import loss_of
from surefoot.model.precision import autocast_context
from surefoot.parallel.cut import Cut, cut
from surefoot.parallel.mesh import place_of
from surefoot.tensors.digest import combine, local_box, tensor_digest
from surefoot.tensors.world import World
from tests.ranks.cutting import cut_model, local, world_of
from tests.ranks.documents import VOCAB_SIZE, atom_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
RICH = ModelSection(
    num_layers=2, d_model=32, num_heads=8, num_kv_heads=4, d_ff=44, init_std=0.1, tie_embeddings=False, qk_norm=True, window=6,
    attention_soft_cap=10.0, logit_soft_cap=15.0, z_loss=1e-3,
)  # fmt: skip
UNEVEN = ModelSection(num_layers=2, d_model=32, num_heads=8, num_kv_heads=4, d_ff=22, init_std=0.1, tie_embeddings=False, qk_norm=True)
"""11 rows of w1 on a rank of tp = 2: not to be halved."""

TP2, CP2 = ParallelSection(tp=2), ParallelSection(cp=2)


def cut_here(section: ModelSection, parallel: ParallelSection, *, world: World, precision: Literal["fp32", "bf16"] = "fp32") -> Cut:
    autocast = autocast_context(precision, CPU, cpu_capabilities={"avx512_bf16": True})
    return cut_model(section, parallel, world=world, vocab_size=VOCAB_SIZE, seed=3, autocast=autocast)


def first_values(*, rank: int, world_size: int, section: ModelSection, parallel: ParallelSection) -> dict[str, int]:
    """Digests of the boxes that this rank is the first to hold, after comparing each with what one process starts from."""
    whole = build_model(section, VOCAB_SIZE, seed=3)
    materialise(whole, seed=3, device=CPU)
    digests: dict[str, int] = {}
    for name, parameter in cut_here(section, parallel, world=world_of(world_size)).module.named_parameters():
        assert isinstance(parameter, DTensor)
        values = whole.get_parameter(name)
        assert torch.equal(parameter.full_tensor(), values), name
        sizes, offsets = local_box(parameter)
        box = values[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        assert torch.equal(parameter.to_local(), box), name
        copies = [
            axis
            for axis, placement in zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
            if placement.is_replicate()
        ]
        digests[name] = 0 if any(copies) else tensor_digest(parameter)
    return digests


@pytest.mark.parametrize(
    "parallel", [replace(TP2, dp_shard=2), replace(TP2, dp_replicate=2), replace(CP2, tp=2)], ids=["fsdp", "copies", "cp"]
)
def test_every_rank_starts_with_one_box_of_what_one_process_starts_from(run_ranks: RunRanks, parallel: ParallelSection) -> None:
    section = UNEVEN
    whole = build_model(section, VOCAB_SIZE, seed=3)
    materialise(whole, seed=3, device=CPU)
    parts = run_ranks(first_values, 4, section=section, parallel=parallel)
    for name, parameter in whole.named_parameters():
        assert combine(part[name] for part in parts) == tensor_digest(parameter.detach()), name


def in_bf16(*, rank: int, world_size: int, parallel: ParallelSection) -> tuple[float, torch.dtype]:
    model_cut = cut_here(RICH, parallel, world=world_of(world_size), precision="bf16")
    nats = model_cut.runner.run([atom_of(0, 0)], start=lambda _: None, loss=partial(loss_of, z_loss=RICH.z_loss))
    assert all(parameter.grad is not None and local(parameter.grad).dtype == torch.float32 for parameter in model_cut.module.parameters())
    assert all(local(parameter.grad).isfinite().all() for parameter in model_cut.module.parameters() if parameter.grad is not None)
    return nats.item(), model_cut.runner.logits(*[ids[:1, :1] for ids in (atom_of(0, 0).tokens_BS,) * 3]).dtype


@pytest.mark.parametrize("parallel", [TP2, CP2], ids=["tp", "cp"])
def test_bf16_stays_near_one_process(run_ranks: RunRanks, parallel: ParallelSection) -> None:
    ((alone, _),) = run_ranks(in_bf16, 1, parallel=ParallelSection())
    told = run_ranks(in_bf16, 2, parallel=parallel)
    total = sum(nats for nats, _ in told) if parallel.cp > 1 else told[0][0]
    assert total == pytest.approx(alone, rel=5e-3)  # 8 bits of significand
    assert total != alone


class Foreign(nn.Module):
    """A model of somebody else, who did not say how it may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


def refused(*, rank: int, world_size: int, parallel: ParallelSection) -> str:
    model = Foreign()
    with pytest.raises(ConfigError) as raised:
        cut(
            model,
            place_of(parallel, rank=rank, world_size=world_size),
            plan=cut_plan(model),
            parallel=parallel,
            materialise=lambda _: None,
            world=world_of(world_size),
            autocast=autocast_context("fp32", CPU),
            collective_limit_s=60.0,
        )
    return str(raised.value.where)


def test_a_model_that_does_not_say_how_is_refused(run_ranks: RunRanks) -> None:
    assert run_ranks(refused, 2, parallel=TP2) == ["[parallel] tp"] * 2
    assert run_ranks(refused, 2, parallel=CP2) == ["[parallel] cp"] * 2
