"""Initial values on real meshes: every rank holds its part of the one tensor that a single process would start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model, materialise, shard_units
from surefoot.tensors.random import InitRule, Normal, initial_values, initialise

RunRanks = Callable[..., list[Any]]

# No mesh of 2, 3 or 4 divides 7 rows; 6 columns over 4 ranks are 2, 2, 2 and none.
SHAPE = torch.Size([7, 6])


def rule_for(fqn: str) -> InitRule:
    return Normal(0.02)


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], *, rank: int) -> torch.Tensor:
    """What `rank` should hold, by torch.chunk along each mesh dim: written without DTensor."""
    part = whole
    coordinates = (mesh.mesh == rank).nonzero()[0].tolist()
    for size, index, placement in zip(mesh.mesh.shape, coordinates, placements, strict=True):
        if isinstance(placement, Shard):
            chunks = part.chunk(size, dim=placement.dim)
            part = chunks[index] if index < len(chunks) else part.narrow(placement.dim, 0, 0)
    return part


def one_parameter(*, rank: int, world_size: int, sizes: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    mesh = init_device_mesh("cpu", sizes)
    module = nn.Module()
    module.w = nn.Parameter(distribute_tensor(torch.zeros(SHAPE), mesh, placements, src_data_rank=None))
    initialise(module, seed=5, rule_for=rule_for)
    assert isinstance(module.w, DTensor)
    whole = initial_values(5, "w", shape=SHAPE, rule=rule_for("w"))
    assert torch.equal(module.w.to_local(), part_of(whole, mesh, placements, rank=rank))
    assert torch.equal(module.w.full_tensor(), whole)


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((2,), (Shard(0),)),
        ((3,), (Shard(0),)),
        ((4,), (Shard(1),)),
        ((2,), (Replicate(),)),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2), (Shard(1), Shard(0))),
    ],
    ids=str,
)
def test_every_mesh_gets_its_part_of_the_same_tensor(
    run_ranks: RunRanks, sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    run_ranks(one_parameter, torch.Size(sizes).numel(), sizes=sizes, placements=placements)


def cut_model(*, rank: int, world_size: int, sizes: tuple[int, ...], columns: bool) -> None:
    section = ModelSection(num_layers=2, d_model=24, num_heads=2, d_ff=20, tie_embeddings=False)
    reference = build_model(section, 100, seed=9)
    materialise(reference, seed=9, device=torch.device("cpu"))
    model = build_model(section, 100, seed=9)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "dp_shard")[-len(sizes) :])
    if columns:
        parallelize_module(model, mesh["outer"], {"head": ColwiseParallel()})
    for unit in shard_units(model).values():
        fully_shard(unit, mesh=mesh["dp_shard"] if columns else mesh)
    fully_shard(model, mesh=mesh["dp_shard"] if columns else mesh)
    materialise(model, seed=9, device=torch.device("cpu"))
    for (name, whole), (_, sharded) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(sharded, DTensor)
        assert torch.equal(sharded.full_tensor(), whole), name


@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_a_model_cut_on_the_meta_device_starts_from_the_bits_of_the_whole(run_ranks: RunRanks, sizes: tuple[int, ...]) -> None:
    run_ranks(cut_model, torch.Size(sizes).numel(), sizes=sizes, columns=False)


def test_sharding_over_a_dimension_that_is_cut_by_columns_already_changes_no_bit(run_ranks: RunRanks) -> None:
    run_ranks(cut_model, 4, sizes=(2, 2), columns=True)
