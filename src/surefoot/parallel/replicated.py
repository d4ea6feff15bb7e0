"""Whole copies of the model: DistributedDataParallel that leaves the *sum* of gradients over ranks in `.grad`, never a mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.parallel.gauges import Gauges

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


def replicate(model: nn.Module, *, device: torch.device, gauges: Gauges) -> DistributedDataParallel:
    """Collective over the world. The loss is a sum over live tokens, divided once by their global count when the update is scaled."""
    replicated = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank initialises or restores the same bits by itself
    )
    replicated.register_comm_hook(None, lambda _, bucket: _sum_bucket(bucket, gauges))
    return replicated


def _sum_bucket(bucket: GradBucket, gauges: Gauges) -> torch.futures.Future[torch.Tensor]:
    gauges.note_contribution(bucket.buffer())
    gauges.note_launch()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])
