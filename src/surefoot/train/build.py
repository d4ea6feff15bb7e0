"""From the config to objects: data, model, cut, optimizer, evaluation. The only place that knows all the rooms it builds from."""

from __future__ import annotations

import os
from functools import partial

import torch

from surefoot.core.sections import NumericsSection, RunConfig
from surefoot.data.loader import ShardedLoader
from surefoot.model.build import build_model, materialise, shard_units
from surefoot.model.precision import autocast_context
from surefoot.parallel.data_parallel import cut
from surefoot.tensors.world import World
from surefoot.train.evaluate import HeldOut
from surefoot.train.optimizers import build_optimizer
from surefoot.train.step import Parts


def make_deterministic(numerics: NumericsSection) -> None:
    """Local. Deterministic kernels, or whatever torch likes. Filling fresh memory is left off: it costs time and proves nothing here."""
    torch.use_deterministic_algorithms(numerics.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set through a module class, not in stubs
    if numerics.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def build_parts(config: RunConfig, world: World) -> Parts:
    """Collective over the world. Raises ConfigError or DataError before any collective when an input is wrong."""
    data = ShardedLoader(
        config.data,
        train=config.train,
        seed=config.run.seed,
        rank=world.rank,
        num_ranks=world.size,
        on_data_change=os.environ.get("SUREFOOT_ON_DATA_CHANGE", "refuse"),
    )
    model = build_model(config.model, data.vocab_size, seed=config.run.seed)
    model_cut = cut(
        model,
        config.parallel,
        units=list(shard_units(model).values()),
        materialise=partial(materialise, seed=config.run.seed, device=world.device),
        world_size=world.size,
        device=world.device,
    )
    autocast = autocast_context(config.train.precision, world.device)
    return Parts(
        config=config,
        world=world,
        cut=model_cut,
        parameters=[parameter for parameter in model_cut.module.parameters() if parameter.requires_grad],
        optimizer=build_optimizer(model_cut.module, config.optimizer),
        autocast=autocast,
        data=data,
        evaluation=HeldOut(data.heldout_batches(), forward=model_cut.module, world=world, autocast=autocast),
    )
