"""Log-likelihoods over a vocabulary that is cut over ranks: no rank ever sees the whole row of a token's logits.

DTensor has a cross-entropy of this kind, but no log Z for the z-loss, and it must be entered as a context around the backward too, which a
pipeline runs elsewhere. This is one function with its own gradient: three numbers per token travel, not V.

Dim letters: N tokens, V logits of a token on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


def is_cut(logits: torch.Tensor) -> bool:
    """Local. Whether the last dim of `logits` is cut over ranks."""
    return isinstance(logits, DTensor) and any(placement.is_shard(logits.dim() - 1) for placement in logits.placements)


def reduce_log_z(logits_BSV: torch.Tensor, labels_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective over the one group that cuts the vocabulary. (log Z, the label's logit) of each token, on every rank of it.

    In float32 at least. A label that is none of the vocabulary has logit 0. The vocabulary must be cut evenly.
    """
    assert isinstance(logits_BSV, DTensor)
    assert logits_BSV.placements == (Shard(logits_BSV.dim() - 1),)
    logits_NV = logits_BSV.to_local().flatten(0, -2)
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    group = logits_BSV.device_mesh.get_group()
    log_z_N, picked_N = _LogZ.apply(logits_NV, labels_N, group)  # type: ignore[no-untyped-call]  # torch leaves Function unannotated
    return log_z_N, picked_N


class _LogZ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        num_columns = logits_NV.shape[1]
        columns_N = labels_N - dist.get_rank(group) * num_columns
        is_here_N = (columns_N >= 0) & (columns_N < num_columns)
        columns_N1 = torch.where(is_here_N, columns_N, 0)[:, None]
        peak_N = logits_NV.amax(dim=-1)
        dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
        z_N = (logits_NV - peak_N[:, None]).exp_().sum(dim=-1)
        sums_2N = torch.stack((z_N, torch.where(is_here_N, logits_NV.gather(1, columns_N1)[:, 0], 0.0)))
        dist.all_reduce(sums_2N, group=group)
        log_z_N, picked_N = sums_2N[0].log() + peak_N, sums_2N[1].clone()
        ctx.save_for_backward(logits_NV, log_z_N, columns_N1, is_here_N)
        return log_z_N, picked_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Every rank starts from the same loss, so each has the whole gradient of its own columns without asking."""
        (of_log_z_N, of_picked_N), (logits_NV, log_z_N, columns_N1, is_here_N) = gradients, ctx.saved_tensors
        gradient_NV = (logits_NV - log_z_N[:, None]).exp_().mul_(of_log_z_N[:, None])
        at_label_N1 = gradient_NV.gather(1, columns_N1) + torch.where(is_here_N, of_picked_N, 0.0)[:, None]
        return gradient_NV.scatter_(1, columns_N1, at_label_N1), None, None
