"""One training step, in its order, on one screen."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from surefoot.core.records import Action, Phase, Redo, StepReport
from surefoot.core.sections import RunConfig
from surefoot.core.stages import stage_at, stages_of
from surefoot.data.batches import StepBatch
from surefoot.data.loader import ShardedLoader
from surefoot.data.tokenizer import Tokenizer
from surefoot.guard import Guard
from surefoot.guard.beating import beat_micro_step, in_phase
from surefoot.model.loss import loss_of
from surefoot.model.rope import set_rope_base
from surefoot.parallel.clip import scale_gradients
from surefoot.parallel.cut import Cut
from surefoot.tensors.batch import Batch
from surefoot.tensors.random import RandomKey
from surefoot.tensors.world import World
from surefoot.train.evaluate import HeldOut
from surefoot.train.optimizers import set_learning_rate
from surefoot.train.scaler import DynamicScaler
from surefoot.train.schedule import learning_rate

progress = logging.getLogger("surefoot.progress")


@dataclass(frozen=True)
class Parts:
    """What a step works with; `train.build` makes it from the config."""

    config: RunConfig
    world: World
    cut: Cut
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    data: ShardedLoader
    tokenizer: Tokenizer
    evaluation: HeldOut
    scaler: DynamicScaler | None = None


def train_step(parts: Parts, guard: Guard) -> StepReport:
    """Collective over the world. Fetch, forward and backward, judge, act, count, persist, tell; between `guard.begin` and the next."""
    with in_phase(Phase.DATA):
        batch = next(parts.data)
    stage = stage_at(parts.config, batch.first_sample)
    tell_stages(parts, batch, step=guard.step + 1)
    set_rope_base(parts.cut.module, stage.rope_base)
    rate = guard.lr_factor * learning_rate(guard.step + 1, parts.config.schedule, num_steps=parts.config.train.num_steps, peak=stage.lr)
    action = compute_and_judge(parts, guard, batch, rate=rate)
    while isinstance(action, Redo):  # it looks ill: the same batch once more, before it touches a weight
        parts.optimizer.zero_grad()
        action = compute_and_judge(parts, guard, parts.data.again(rotation=action.rotation), rate=rate)
    if action.proceeds:
        scale_gradients(parts.parameters, guard.clip_scale)
        set_learning_rate(parts.optimizer, rate)
        parts.optimizer.step()
        guard.applied()
    parts.optimizer.zero_grad()
    return guard.finish()


def compute_and_judge(parts: Parts, guard: Guard, batch: StepBatch, *, rate: float) -> Action:
    """Collective over the world. Forward and backward of a batch, and what is to be done with its gradient."""
    begun_s = time.monotonic()
    nats = forward_backward(parts, batch.micro_batches, step=guard.step)
    place = parts.cut.place
    return guard.judge(
        nats if place.counts_loss else torch.zeros_like(nats),
        batch.num_live_tokens if place.counts_tokens else 0,
        lr=rate,
        data_wait_s=batch.data_wait_s,
        forward_backward_s=time.monotonic() - begun_s,
    )


def tell_stages(parts: Parts, batch: StepBatch, *, step: int) -> None:
    """Local. A line on the console, from rank 0, for each stage that begins in this step."""
    for stage in stages_of(parts.config)[1:]:
        if parts.world.leads and batch.first_sample <= stage.first_sample < parts.data.next_sample:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in parts.data.course.order.planned_shares(stage.first_sample).items())
            progress.info(
                "stage from sample %d, in step %d: %s; %d tokens, rotary base %g, peak lr %g",
                *(stage.first_sample, step, shares, stage.seq_len, stage.rope_base, stage.lr),
            )


def forward_backward(parts: Parts, atoms: Sequence[Batch], *, step: int) -> torch.Tensor:
    """Collective over the grid. Adds the gradient of the *sum* over live tokens into `.grad`; returns this rank's nats, float64.

    Under fp16 it is the gradient of the scaled sum: `guard.clip_scale` takes the scale out again. Whatever the model draws comes from
    streams keyed by (seed, step, atom): not by rank, history or number of ranks.
    """

    def start(atom: Batch) -> None:
        beat_micro_step(atom.atom)
        RandomKey(parts.config.run.seed, step, atom.atom).start_streams()

    return parts.cut.runner.run(
        atoms,
        start=start,
        loss=partial(loss_of, z_loss=parts.config.model.z_loss, scale=parts.scaler.scale if parts.scaler else 1.0),
    )
