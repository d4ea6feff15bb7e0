"""Scaling gradients by a factor that was agreed before: the norm is measured in the exchange, never here."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def scale_gradients(parameters: Iterable[torch.nn.Parameter], scale: float) -> None:
    """Local. Multiply every gradient in place by `scale`, sharded or not."""
    if scale == 1.0:
        return
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
