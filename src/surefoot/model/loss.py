"""The loss as a sum: nats over live tokens, divided once and for all ranks by the global live-token count, elsewhere.

Dim letters: B samples, S positions, N = B * S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from surefoot.tensors.batch import IGNORED_LABEL, Batch

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossSums:
    """float32 scalars, summed over live tokens. `nats` is the cross-entropy, detached: what is reported. `objective` adds the z-loss and
    carries the graph: what `backward` starts from."""

    nats: torch.Tensor
    objective: torch.Tensor


def loss_sum(forward: Forward, batch: Batch, *, z_loss: float = 0.0) -> LossSums:
    """Collective where `forward` is. Run one atom and sum its loss in float32.

    A phantom gives 0 and a gradient of exactly zero for every parameter that `forward` uses. The logits are the largest tensor of the step:
    they are viewed, never copied, unless the forward ran in bf16.
    """
    return loss_of(forward(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS), batch, z_loss=z_loss)


def loss_of(logits_BSV: torch.Tensor, batch: Batch, *, z_loss: float = 0.0) -> LossSums:
    """Local, or collective where the logits are cut. In float32; in float64 where the logits are."""
    logits_NV, labels_N = logits_BSV.flatten(0, 1), batch.labels_BS.flatten()
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    nats = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="sum")
    objective = nats + z_loss * _log_z_squared(logits_NV, labels_N) if z_loss else nats
    return LossSums(nats=nats.detach(), objective=objective)


def _log_z_squared(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """The sum of log(Z)^2 over live tokens (PaLM, arXiv 2204.02311): keeps logits from drifting away together."""
    live_N = labels_N != IGNORED_LABEL
    return torch.where(live_N, torch.logsumexp(logits_NV, dim=-1).square(), 0.0).sum()
