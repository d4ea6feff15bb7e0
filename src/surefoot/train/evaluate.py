"""The held-out loss: the same samples every time, dealt over the ranks in atoms, summed over all of them."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch

from surefoot.core.records import HeldOutLoss
from surefoot.data.loader import HeldoutBatches
from surefoot.model.loss import Forward, loss_sum
from surefoot.tensors.world import World, reduce_sum


class HeldOut:
    """An EvalPort over batches that were fixed at the start."""

    def __init__(self, batches: HeldoutBatches, *, forward: Forward, world: World, autocast: AbstractContextManager[Any]) -> None:
        self._batches = batches
        self._forward = forward
        self._world = world
        self._autocast = autocast

    def held_out(self) -> HeldOutLoss | None:
        """Collective over the world. None when no document was held out. Changes no state and draws no random number."""
        nats = torch.zeros((), dtype=torch.float64, device=self._world.device)
        with torch.no_grad(), self._autocast:
            for atom in self._batches.micro_batches:
                nats += loss_sum(self._forward, atom.to(self._world.device)).nats
        counts = torch.tensor([self._batches.num_live_tokens, self._batches.num_bytes], dtype=torch.float64, device=self._world.device)
        total_nats, num_tokens, num_bytes = reduce_sum(self._world, torch.cat((nats.reshape(1), counts))).tolist()
        if not num_tokens:
            return None
        loss = total_nats / num_tokens
        return HeldOutLoss(loss=loss, bits_per_byte=total_nats / math.log(2) / num_bytes, num_tokens=int(num_tokens))
