"""From a whole model on the meta device to this rank's part of it, filled, and what runs it.

The order is fixed: exact uses, then tensor and context cuts inside the layers, then recomputation, all on the whole model, whose submodules
the stages share; then stages, then sharding over the data axes, then memory and values. Each step has a room of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from surefoot.core.cut_plan import CutPlan
from surefoot.core.ports import GaugePort, NumericsPort
from surefoot.core.sections import ParallelSection
from surefoot.parallel.all_gather import time_gathers
from surefoot.parallel.context import PartOfSequence, SequencePart, gather_keys
from surefoot.parallel.exact import ExactRunner, ExactSums, Uses
from surefoot.parallel.gauges import Gauges
from surefoot.parallel.mesh import Place, build_mesh, shard_mesh, warn_of_placement
from surefoot.parallel.pipeline import build_pipeline, cut_stages
from surefoot.parallel.recompute import recompute
from surefoot.parallel.reductions import Reductions, measure_contributions
from surefoot.parallel.replicated import replicate
from surefoot.parallel.running import Runner, Sequential
from surefoot.parallel.sharded import shard
from surefoot.parallel.tensor import cut_tensors
from surefoot.tensors.world import World


@dataclass(frozen=True)
class Cut:
    """A model after cutting. `module` owns this rank's parameters under the names they have in the whole model; `runner` computes.
    `roots` are what was sharded: the model, the stages of a pipeline, or nothing.

    `needs_rehearsal`: DDP sorts its buckets anew after the first backward of a process, and a bucket's layout decides the order of sums at
    3 ranks and more: without a backward before step 1, the first step after a resume would sum in another order than an undisturbed run.
    """

    module: nn.Module
    place: Place
    runner: Runner
    roots: tuple[nn.Module, ...] = ()
    needs_rehearsal: bool = False
    exact_sums: NumericsPort | None = None
    gauges: GaugePort | None = None


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
    exact_sums: bool = False,
) -> Cut:
    """Collective over the world. Cut `model`, then fill it: `materialise` sees the sharded parameters, so no rank ever holds the whole.

    With `exact_sums` whole copies are a mesh too: DDP adds up in float32.
    """
    uses = Uses(model) if exact_sums else None
    gauges = Gauges(device=world.device)
    if place.sizes["dp_replicate"] == world.size and not (exact_sums and world.size > 1):
        recompute(_blocks(model, plan), mode=parallel.recompute)
        materialise(model)
        forward = replicate(model, device=world.device, gauges=gauges) if world.size > 1 else model
        alone = Sequential(forward, world.device, autocast, gauges=gauges)
        whole = Cut(model, place, alone, needs_rehearsal=world.size > 1, gauges=gauges)
        return _exactly(whole, uses, world=world)
    warn_of_placement(place, ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    mesh = build_mesh(place, device_type=world.device.type, collective_limit_s=collective_limit_s)
    part = _cut_layers(model, mesh, place, plan=plan)
    recompute(_blocks(model, plan), mode=parallel.recompute)
    sums_dtype = torch.float64 if exact_sums else None
    if place.sizes["pp"] > 1:
        own, stages = cut_stages(model, mesh, place, plan=plan, parallel=parallel, autocast=autocast, sums_dtype=sums_dtype)
        materialise(own)
        pipeline = build_pipeline(own, stages, mesh, place, plan=plan, parallel=parallel, device=world.device, gauges=gauges)
        return _exactly(Cut(own, place, _over_part(pipeline, part, place), tuple(stages), gauges=gauges), uses, world=world)
    frees_parameters = parallel.zero_stage == 3
    units = [model.get_submodule(name) for name in plan.units]
    root = shard(model, units, mesh=shard_mesh(mesh, place), frees_parameters=frees_parameters, sums_dtype=sums_dtype)
    materialise(model)
    goes_on_beside = world.device.type == "cpu" and place.sizes["dp_replicate"] == 1 and not exact_sums
    if world.device.type == "cpu":
        time_gathers(root, gauges=gauges)
    if not goes_on_beside:
        measure_contributions(root, gauges=gauges)
    runner = Sequential(
        model,
        world.device,
        autocast,
        reduces_each_micro_step=parallel.zero_stage > 1 and not exact_sums,
        frees_parameters=frees_parameters,
        reductions=Reductions(root, gauges=gauges) if goes_on_beside else None,
        gauges=gauges,
    )
    return _exactly(Cut(model, place, _over_part(runner, part, place), (model,), gauges=gauges), uses, world=world)


def _blocks(model: nn.Module, plan: CutPlan) -> list[nn.Module]:
    """Of a foreign model, what is gathered together."""
    return [model.get_submodule(name) for name in plan.blocks or plan.units]


def _cut_layers(model: nn.Module, mesh: DeviceMesh, place: Place, *, plan: CutPlan) -> SequencePart:
    """Local. Tensor and context parallel, where they are wanted."""
    if place.sizes["tp"] > 1:
        cut_tensors(model, mesh["tp"], plan=plan)
    if place.sizes["cp"] == 1:
        return SequencePart()
    part = SequencePart(place.coordinates["cp"], place.sizes["cp"], mesh["cp"].get_group())
    gather_keys(model, part, plan=plan)
    return part


def _exactly(made: Cut, uses: Uses | None, *, world: World) -> Cut:
    """Local. With sums that do not depend on their order, where `uses` are asked for."""
    if uses is None:
        return made
    sums = ExactSums(list(uses.cells), num_elements=uses.num_elements)
    runner = ExactRunner(made.runner, module=made.module, roots=made.roots, uses=uses, sums=sums, world=world)
    return replace(made, runner=runner, exact_sums=sums)


def _over_part(runner: Runner, part: SequencePart, place: Place) -> Runner:
    """Local. `runner`, with the positions of this rank only where positions are cut, by context or tensor parallel."""
    if place.sizes["cp"] * place.sizes["tp"] == 1:
        return runner
    return PartOfSequence(runner, part, multiple_of=part.num_pieces * place.sizes["tp"])
