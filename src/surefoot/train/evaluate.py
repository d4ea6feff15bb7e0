"""Losses on held-out samples: the same ones every time, dealt over the ranks in atoms, summed over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from surefoot.core.ports import DataPort
from surefoot.core.records import HeldOutLoss
from surefoot.core.sections import RunConfig
from surefoot.core.stages import stage_before
from surefoot.data.batches import HeldoutBatches
from surefoot.model.loss import LossSums, loss_of
from surefoot.model.rope import set_rope_base
from surefoot.parallel.cut import Cut
from surefoot.tensors.batch import IGNORED_LABEL, Batch
from surefoot.tensors.world import World, reduce_sum


class HeldOut:
    """A CanaryPort over batches that were fixed at the start: of `data.seq_len`, whatever the stage, so that losses can be compared.

    The model turns by the base of the stage that it was last trained in, which `data` knows: after a restore too.
    """

    def __init__(
        self,
        batches: HeldoutBatches,
        *,
        cut: Cut,
        world: World,
        config: RunConfig,
        data: DataPort,
        canary: HeldoutBatches | None = None,
    ) -> None:
        self._batches = batches
        self._canary = canary
        self._cut = cut
        self._world = world
        self._config = config
        self._data = data

    def held_out(self) -> HeldOutLoss | None:
        """Collective over the world. None when no document was held out. Changes no state and draws no random number."""
        return self._loss_on(self._batches)

    def canary(self) -> HeldOutLoss | None:
        """Collective over the world. The same on the canary's samples; None where the config wants none."""
        return self._loss_on(self._canary) if self._canary is not None else None

    def _loss_on(self, batches: HeldoutBatches) -> HeldOutLoss | None:
        set_rope_base(self._cut.module, stage_before(self._config, self._data.next_sample).rope_base)
        by_source = _BySource(batches, device=self._world.device)
        with evaluating(self._cut.module):
            nats = self._cut.runner.evaluate(batches.micro_batches, loss=by_source.loss)
        place = self._cut.place
        sums = torch.cat((nats.reshape(1), by_source.nats))
        sums = sums if place.counts_loss else torch.zeros_like(sums)
        counts = torch.tensor([batches.num_bytes, *batches.live_tokens_of_source], dtype=torch.float64, device=self._world.device)
        total_nats, *rest = reduce_sum(self._world, torch.cat((sums, counts * place.counts_tokens))).tolist()
        nats_of, (num_bytes, *tokens_of) = rest[: len(batches.sources)], rest[len(batches.sources) :]
        if not (num_tokens := sum(tokens_of)):
            return None
        per_source = {name: nats / num for name, nats, num in zip(batches.sources, nats_of, tokens_of, strict=True) if num}
        bits_per_byte = total_nats / math.log(2) / num_bytes
        return HeldOutLoss(total_nats / num_tokens, bits_per_byte, num_tokens=int(num_tokens), per_source=per_source)


class _BySource:
    """A loss that also adds up the nats of each source, over one pass. Local."""

    def __init__(self, batches: HeldoutBatches, *, device: torch.device) -> None:
        self.nats = torch.zeros(len(batches.sources), dtype=torch.float64, device=device)
        self._rows = {batch.atom: rows for batch, rows in zip(batches.micro_batches, batches.source_of_row, strict=True)}

    def loss(self, logits_BSV: torch.Tensor, atom: Batch) -> LossSums:
        """The sum is that of `loss_of`. An atom at the border of two sources is looked at once more for each."""
        sums = loss_of(logits_BSV, atom)
        rows = self._rows[atom.atom]
        sources = set(rows) - {-1}
        for source in sorted(sources):
            self.nats[source] += (sums if len(sources) == 1 else loss_of(logits_BSV, _only(atom, [row == source for row in rows]))).nats
        return sums


def _only(atom: Batch, rows: list[bool]) -> Batch:
    """`atom` with no label in other rows."""
    kept_B1 = torch.tensor(rows, device=atom.labels_BS.device)[:, None]
    return replace(atom, labels_BS=atom.labels_BS.where(kept_B1, IGNORED_LABEL))


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
