"""The held-out loss: the same samples every time, dealt over the ranks in atoms, summed over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from surefoot.core.ports import DataPort
from surefoot.core.records import HeldOutLoss
from surefoot.core.sections import RunConfig
from surefoot.core.stages import stage_before
from surefoot.data.batches import HeldoutBatches
from surefoot.model.loss import loss_of
from surefoot.model.rope import set_rope_base
from surefoot.parallel.cut import Cut
from surefoot.tensors.world import World, reduce_sum


class HeldOut:
    """An EvalPort over batches that were fixed at the start: of `data.seq_len`, whatever the stage, so that losses can be compared.

    The model turns by the base of the stage that it was last trained in, which `data` knows: after a restore too.
    """

    def __init__(self, batches: HeldoutBatches, *, cut: Cut, world: World, config: RunConfig, data: DataPort) -> None:
        self._batches = batches
        self._cut = cut
        self._world = world
        self._config = config
        self._data = data

    def held_out(self) -> HeldOutLoss | None:
        """Collective over the world. None when no document was held out. Changes no state and draws no random number."""
        set_rope_base(self._cut.module, stage_before(self._config, self._data.next_sample).rope_base)
        with evaluating(self._cut.module):
            nats = self._cut.runner.evaluate(self._batches.micro_batches, loss=loss_of)
        counts = torch.tensor([self._batches.num_live_tokens, self._batches.num_bytes], dtype=torch.float64, device=self._world.device)
        place = self._cut.place
        nats = nats if place.counts_loss else torch.zeros_like(nats)
        mine = torch.cat((nats.reshape(1), counts * place.counts_tokens))
        total_nats, num_tokens, num_bytes = reduce_sum(self._world, mine).tolist()
        if not num_tokens:
            return None
        loss = total_nats / num_tokens
        return HeldOutLoss(loss=loss, bits_per_byte=total_nats / math.log(2) / num_bytes, num_tokens=int(num_tokens))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without gradients and in eval mode, so that nothing is dropped, no statistic moves and no random number is drawn."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
