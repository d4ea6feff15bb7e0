"""The seam at which `fully_shard` reduces the gradients of a unit: what goes in is looked at there, and how it is reduced is up to us."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

# The interface that FSDPModule.set_custom_reduce_scatter asks for; torch exports the method but not the class.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class Reduce(Protocol):
    """Fills `output_tensor`, this rank's shard, from `input_tensor`, its whole gradient."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, group: dist.ProcessGroup, op: Any, async_op: bool
    ) -> dist.Work | None: ...


def reduce_at_once(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, group: dist.ProcessGroup, op: Any, async_op: bool
) -> dist.Work | None:
    """Collective over the sharding ranks. What `fully_shard` calls itself."""
    work: dist.Work | None = dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
    return work


class SeenReduceScatter(ReduceScatter):
    """Shows what goes in to `look`, then has `reduce` do it.

    `fully_shard` asks for the memory of what goes in, fills it, and asks for the memory of what comes out. That is where it is looked at,
    for over an axis of one rank no collective is called.
    """

    def __init__(self, look: Callable[[torch.Tensor], None], reduce: Reduce = reduce_at_once) -> None:
        self._look = look
        self._reduce = reduce
        self._entering: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        entering, self._entering = self._entering, None
        if entering is None:
            self._entering = made
        else:
            self._look(entering)
        return made

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return self._reduce(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
