"""From the config to objects: data, model, cut, optimizer, evaluation. The only place that knows all the rooms it builds from."""

from __future__ import annotations

import os
from functools import partial
from typing import cast, get_args

import torch

from surefoot.core.errors import ConfigError
from surefoot.core.sections import NumericsSection, RunConfig
from surefoot.data.cursor import OnDataChange
from surefoot.data.loader import ShardedLoader
from surefoot.data.manifest import TOKENIZER_NAME
from surefoot.data.tokenizer import load_tokenizer
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


def _on_data_change() -> OnDataChange:
    """A wish of this start, so it comes by the environment of the rank and not by the config of the run."""
    wish = os.environ.get("SUREFOOT_ON_DATA_CHANGE", "refuse")
    if wish not in get_args(OnDataChange):
        raise ConfigError(f"{wish!r} is none of {', '.join(get_args(OnDataChange))}", where="SUREFOOT_ON_DATA_CHANGE")
    return cast(OnDataChange, wish)


def build_parts(config: RunConfig, world: World) -> Parts:
    """Collective over the world. Raises ConfigError or DataError before any collective when an input is wrong."""
    data = ShardedLoader(
        config.data.path,
        data=config.data,
        train=config.train,
        seed=config.run.seed,
        rank=world.rank,
        num_ranks=world.size,
        on_data_change=_on_data_change(),
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
        tokenizer=load_tokenizer(data.path / TOKENIZER_NAME),
        evaluation=HeldOut(data.heldout_batches(), forward=model_cut.module, world=world, autocast=autocast),
    )
