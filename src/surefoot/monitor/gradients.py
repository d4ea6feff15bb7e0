"""What the gradients say before the update, counted once however the parameters are replicated or sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from surefoot.core.errors import SurefootError


def counted_gradients(parameters: Iterable[torch.nn.Parameter], *, rank: int, world_size: int) -> list[torch.Tensor]:
    """Local. The local gradient tensors that this rank counts, so that over all ranks each element is counted exactly once.

    A plain parameter is whole on every rank: they are dealt to ranks, largest first, which shares the reading too. A sharded one is counted
    where its shard is, by the first of the ranks that hold the same shard.
    """
    whole: list[torch.Tensor] = []
    counted: list[torch.Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            local = gradient.to_local()
            if _is_first_replica(gradient) and local.numel():
                counted.append(local)
        else:
            whole.append(gradient)
    load = [0] * world_size
    for gradient in sorted(whole, key=lambda tensor: -tensor.numel()):
        owner = load.index(min(load))
        load[owner] += gradient.numel()
        if owner == rank:
            counted.append(gradient)
    return counted


def squared_norm_and_nonfinite(gradients: Sequence[torch.Tensor], *, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Local. float64 scalars on `device`: the sum of squares, and the number of tensors whose norm is not finite.

    Norms per tensor are taken in float32 at least: float16 overflows at 65,504. A norm is 20 times
    cheaper than isfinite here and sees the same tensors.
    """
    if not gradients:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return zero, zero.clone()
    halves = any(gradient.dtype.itemsize < 4 for gradient in gradients)
    norms = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32 if halves else None)).to(torch.float64)
    return norms.square().sum(), (~norms.isfinite()).sum().to(torch.float64)


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    if any(placement.is_partial() for placement in tensor.placements):
        raise SurefootError(
            "a gradient is still a partial sum, so its norm is not known", where="gradients", hint="reduce it before guard.judge"
        )
    return all(coordinate[axis] == 0 for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
