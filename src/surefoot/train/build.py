"""From the config to objects: data, model, cut, optimizer, evaluation. The only place that knows all the rooms it builds from."""

from __future__ import annotations

import logging
import os
import random
from functools import partial
from typing import cast, get_args

import numpy as np
import torch

from surefoot.core.canary_cost import canary_samples, canary_words
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.hashing import key64
from surefoot.core.sections import NumericsSection, RunConfig
from surefoot.core.stages import stages_of
from surefoot.data.batches import HeldoutBatches
from surefoot.data.cursor import OnDataChange
from surefoot.data.loader import ShardedLoader
from surefoot.data.manifest import TOKENIZER_NAME
from surefoot.data.tokenizer import Tokenizer
from surefoot.model.build import build_model, cut_plan, materialise
from surefoot.model.precision import autocast_context
from surefoot.parallel.cut import cut
from surefoot.parallel.mesh import place_of
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch
from surefoot.tensors.world import World
from surefoot.train.evaluate import HeldOut
from surefoot.train.optimizers import build_optimizer
from surefoot.train.scaler import build_scaler
from surefoot.train.step import Parts, forward_backward

progress = logging.getLogger("surefoot.progress")


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
    place = place_of(config.parallel, rank=world.rank, world_size=world.size)
    data = ShardedLoader(
        config.data.path,
        data=config.data,
        train=config.train,
        seed=config.run.seed,
        rank=place.data_rank,
        num_ranks=place.num_data_ranks,
        stages=stages_of(config),
        on_data_change=_on_data_change(),
    )
    if world.leads and len(data.manifest.sources) > 1:
        progress.info("data: %s by the last step", data.course.planned())
    tokenizer = Tokenizer(data.course.storage.read(TOKENIZER_NAME), where=f"{data.path}/{TOKENIZER_NAME}")
    if tokenizer.sha256 != data.manifest.tokenizer.sha256:
        raise DataError(
            "the tokenizer is not the one that made the tokens beside it",
            where=f"{data.path}/{TOKENIZER_NAME}",
            hint="put the old file back, or prepare the data again",
            got=tokenizer.sha256,
            wanted=data.manifest.tokenizer.sha256,
        )
    model = build_model(config.model, data.vocab_size, seed=config.run.seed)
    model_cut = cut(
        model,
        place,
        plan=cut_plan(model),
        parallel=config.parallel,
        materialise=partial(materialise, seed=config.run.seed, device=world.device),
        world=world,
        autocast=autocast_context(config.train.precision, world.device),
        collective_limit_s=config.launch.collective_limit_s,
        exact_sums=config.numerics.sums == "exact",
    )
    parts = Parts(
        config=config,
        world=world,
        cut=model_cut,
        parameters=[parameter for parameter in model_cut.module.parameters() if parameter.requires_grad],
        optimizer=build_optimizer(model_cut.module, config.optimizer, model_section=config.model),
        data=data,
        tokenizer=tokenizer,
        evaluation=HeldOut(
            data.heldout_batches(), cut=model_cut, world=world, config=config, data=data, canary=_canary_batches(config, data, world)
        ),
        scaler=build_scaler(config),
    )
    if model_cut.needs_rehearsal:
        _rehearse(parts)
    _start_process_streams(config.run.seed)
    return parts


def _canary_batches(config: RunConfig, data: ShardedLoader, world: World) -> HeldoutBatches | None:
    """Local. None where the config wants no canary, or nothing is held out. What it costs is said."""
    wanted = canary_samples(config.canary, config.train, seq_len=config.data.seq_len)
    batches = data.heldout_batches(wanted, behind=config.train.eval_num_samples)
    if not batches.num_samples:
        return None
    if world.leads:
        progress.info(canary_words(batches.num_samples, config.canary, config.train, seq_len=config.data.seq_len))
    return batches


def _rehearse(parts: Parts) -> None:
    """Collective over the data axes. One backward on a phantom atom, of which nothing stays but the order of the reductions' buckets."""
    shape = (parts.config.train.micro_batch_size, parts.config.data.seq_len)
    zeros = torch.zeros(shape, dtype=torch.int64)
    phantom = Batch(
        tokens_BS=zeros,
        labels_BS=torch.full_like(zeros, IGNORED_LABEL),
        positions_BS=torch.arange(shape[1]).expand(shape),
        doc_ids_BS=zeros,
        sample_ids_B=torch.full(shape[:1], PHANTOM_SAMPLE),
        num_live_tokens=0,
        atom=0,
    )
    kept = [buffer.clone() for buffer in parts.cut.module.buffers()]
    forward_backward(parts, [phantom], step=0)
    parts.optimizer.zero_grad()
    for buffer, before in zip(parts.cut.module.buffers(), kept, strict=True):
        buffer.copy_(before)


def _start_process_streams(seed: int) -> None:
    """Python's and NumPy's generators at the start of a run; a restore puts back where they were."""
    random.seed(key64(seed, "python"))
    np.random.seed(key64(seed, "numpy") % 2**32)
