"""The loss as a sum: nats over live tokens, divided once and for all ranks by the global live-token count, elsewhere.

Dim letters: B samples, S positions, N = B * S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from surefoot.model.precision import at_least_float32
from surefoot.tensors.batch import IGNORED_LABEL, Batch
from surefoot.tensors.cut_vocabulary import is_cut, reduce_log_z

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossSums:
    """Scalars, summed over live tokens, float32 at least. `nats` is the cross-entropy, detached: what is reported. `objective` adds the
    z-loss, is scaled, and carries the graph: what `backward` starts from."""

    nats: torch.Tensor
    objective: torch.Tensor


def loss_sum(forward: Forward, batch: Batch, *, z_loss: float = 0.0) -> LossSums:
    """Collective where `forward` is. Run one atom and sum its loss in float32.

    A phantom gives 0 and a gradient of exactly zero for every parameter that `forward` uses. The logits are the largest tensor of the step:
    they are viewed, never copied, unless the forward ran in half precision.
    """
    return loss_of(forward(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS), batch, z_loss=z_loss)


def loss_of(logits_BSV: torch.Tensor, batch: Batch, *, z_loss: float = 0.0, scale: float = 1.0) -> LossSums:
    """Local; collective over the ranks that the vocabulary of the logits is cut over. In float32; in float64 where the logits are.

    The z-loss is log(Z)^2 (PaLM, arXiv 2204.02311): it keeps logits from drifting away together. `scale` multiplies the objective alone.
    """
    labels_N = batch.labels_BS.flatten()
    live_N = labels_N != IGNORED_LABEL
    if is_cut(logits_BSV):
        log_z_N, picked_N = reduce_log_z(logits_BSV, labels_N)
        nats = torch.where(live_N, log_z_N - picked_N, 0.0).sum()
    else:
        logits_NV = at_least_float32(logits_BSV.flatten(0, 1))
        nats = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="sum")
        log_z_N = torch.logsumexp(logits_NV, dim=-1) if z_loss else nats
    objective = nats + z_loss * torch.where(live_N, log_z_N.square(), 0.0).sum() if z_loss else nats
    return LossSums(nats=nats.detach(), objective=objective if scale == 1.0 else objective * scale)
