"""Parameters, gradients and moments cut over ranks: `fully_shard`, with or without whole copies beside (HSDP)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard(model: nn.Module, units: Sequence[nn.Module], *, mesh: DeviceMesh) -> FSDPModule:
    """Local. Gradients come out as the *sum* over ranks, never a mean."""
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    assert isinstance(model, FSDPModule)  # fully_shard changed its class
    return model
