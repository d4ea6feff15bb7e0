"""From a whole model on the meta device to this rank's part of it, filled, and what runs it.

The order is fixed: stages, then exact uses, then tensor and context cuts inside the layers, then recomputation, then sharding over the
data axes, then memory and values. Each step has a room of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from surefoot.core.cut_plan import CutPlan
from surefoot.core.sections import ParallelSection
from surefoot.parallel.mesh import Place, build_mesh, shard_mesh
from surefoot.parallel.replicated import replicate
from surefoot.parallel.running import Runner, Sequential
from surefoot.parallel.sharded import shard
from surefoot.tensors.world import World


@dataclass(frozen=True)
class Cut:
    """A model after cutting. `module` owns this rank's parameters under the names they have in the whole model; `runner` computes.

    `needs_rehearsal`: DDP sorts its buckets anew after the first backward of a process, and a bucket's layout decides the order of sums at
    3 ranks and more: without a backward before step 1, the first step after a resume would sum in another order than an undisturbed run.
    """

    module: nn.Module
    place: Place
    runner: Runner
    needs_rehearsal: bool = False


def cut(
    model: nn.Module,
    place: Place,
    *,
    plan: CutPlan,
    parallel: ParallelSection,
    materialise: Callable[[nn.Module], None],
    world: World,
    autocast: AbstractContextManager[Any],
    collective_limit_s: float,
) -> Cut:
    """Collective over the world. Cut `model`, then fill it: `materialise` sees the sharded parameters, so no rank ever holds the whole."""
    if place.sizes["dp_replicate"] < world.size:
        mesh = build_mesh(place, device_type=world.device.type, collective_limit_s=collective_limit_s)
        shard(model, [model.get_submodule(name) for name in plan.units], mesh=shard_mesh(mesh, place))
        materialise(model)
        return Cut(model, place, Sequential(model, world.device, autocast))
    materialise(model)
    if world.size == 1:
        return Cut(model, place, Sequential(model, world.device, autocast))
    return Cut(model, place, Sequential(replicate(model, device=world.device), world.device, autocast), needs_rehearsal=True)
