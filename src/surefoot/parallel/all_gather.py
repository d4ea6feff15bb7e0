"""The seam at which `fully_shard` gathers the parameters of a unit: on a CPU the call returns when all ranks have come, so it is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# The interface that FSDPModule.set_custom_all_gather asks for; torch exports the method but not the class.
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from surefoot.parallel.gauges import Gauges
from surefoot.parallel.sharded import sharded_modules


class TimedAllGather(AllGather):
    """What `fully_shard` calls itself, and how long it took counts as waiting for other ranks."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._gauges.gathering():
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


def time_gathers(root: FSDPModule, *, gauges: Gauges) -> None:
    """Local. On a CPU. After `root` has its memory."""
    for unit in sharded_modules(root):
        unit.set_custom_all_gather(TimedAllGather(gauges))
