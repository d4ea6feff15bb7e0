"""Shared by tests that cut our model by hand, without data or a run around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from surefoot.core.sections import ModelSection, ParallelSection
from surefoot.model.build import build_model, cut_plan, materialise
from surefoot.parallel.cut import Cut, cut
from surefoot.parallel.mesh import place_of
from surefoot.tensors.world import World, join_world, single_world

CPU = torch.device("cpu")
LIMIT_S = 60.0


def world_of(world_size: int) -> World:
    """Collective over the default group, where there is one."""
    return join_world(device=CPU, collective_limit_s=LIMIT_S) if world_size > 1 else single_world(CPU)


def cut_model(
    section: ModelSection,
    parallel: ParallelSection,
    *,
    world: World,
    vocab_size: int,
    seed: int = 4,
    dtype: torch.dtype | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    collective_limit_s: float = LIMIT_S,
) -> Cut:
    """Collective over the world. Our model of `section` with values of `seed`, cut as `parallel` says."""
    model = build_model(section, vocab_size, seed=seed)
    if dtype is not None:
        model = model.to(dtype)
    return cut(
        model,
        place_of(parallel, rank=world.rank, world_size=world.size),
        plan=cut_plan(model),
        parallel=parallel,
        materialise=partial(materialise, seed=seed, device=CPU),
        world=world,
        autocast=autocast or nullcontext(),
        collective_limit_s=collective_limit_s,
    )


def local(parameter: torch.Tensor) -> torch.Tensor:
    """What of it is on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
