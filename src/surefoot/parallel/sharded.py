"""Parameters, gradients and moments cut over ranks: `fully_shard`, with or without whole copies beside (HSDP), in three stages.

Stage 3 frees a unit's parameters after every use. Stages 2 and 1 keep them gathered from the first forward of a step to its last backward.
Stages 3 and 2 reduce gradients in every micro-step, so a rank never holds more of them than its shard and one unit; stage 1 adds up whole
gradients and reduces them once. Moments are sharded in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    frees_parameters: bool = True,
    sums_dtype: torch.dtype | None = None,
) -> FSDPModule:
    """Local. Gradients come out as the *sum* over ranks, never a mean.

    With `frees_parameters` a unit's are freed after its forward too; those of the root, which its backward begins with, never are.
    Gradients are added up in `sums_dtype` (default: their own), over micro-steps that do not reduce and over ranks, and cast back once.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=sums_dtype)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=frees_parameters, mp_policy=policy)
    root: FSDPModule = fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for module in sharded_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return root


def begin_micro_step(root: FSDPModule, *, frees_parameters: bool, reduces: bool, is_last: bool) -> None:
    """Local. Before the forward of a micro-step. Whole copies (HSDP) exchange their sums in the last one only."""
    root.set_requires_gradient_sync(reduces)
    root.set_requires_all_reduce(is_last)
    root.set_reshard_after_backward(frees_parameters or is_last)
    root.set_is_last_backward(is_last)


def release(root: FSDPModule) -> None:
    """Local. Frees what a forward without a backward left gathered: an update would not reach it."""
    for module in sharded_modules(root):
        module.reshard()


def sharded_modules(root: FSDPModule) -> list[FSDPModule]:
    assert isinstance(root, nn.Module)  # fully_shard only changed its class
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
