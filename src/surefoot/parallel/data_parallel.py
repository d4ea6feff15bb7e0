"""Cutting a model over the data axes: replicated (DDP) or sharded (fully_shard, HSDP).

Both leave the *sum* of gradients over ranks in `.grad`, never a mean: the loss is a sum over live tokens, divided once by their global
count when the update is scaled. Reductions happen in the last micro-step only, overlapped with its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.sections import ParallelSection
from surefoot.parallel.mesh import build_mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


@dataclass(frozen=True)
class Cut:
    """A model after cutting. `module` owns parameters and names; `forward` is what is called; `reduces` marks the reducing micro-step."""

    module: nn.Module
    forward: Callable[..., Any]
    _wrapped: DistributedDataParallel | FSDPModule | None

    @property
    def needs_rehearsal(self) -> bool:
        """DDP sorts its buckets anew after the first backward of a process, and a bucket's layout decides the order of sums at 3 ranks and
        more: without a backward before step 1, the first step after a resume would sum in another order than an undisturbed run."""
        return isinstance(self._wrapped, DistributedDataParallel)

    @contextmanager
    def micro_step(self, *, is_last: bool) -> Iterator[None]:
        """Gradients stay local until the micro-step that `is_last`."""
        if isinstance(self._wrapped, DistributedDataParallel) and not is_last:
            with self._wrapped.no_sync():
                yield
            return
        if isinstance(self._wrapped, FSDPModule):
            self._wrapped.set_requires_gradient_sync(is_last)
        yield


def cut(
    model: nn.Module,
    parallel: ParallelSection,
    *,
    units: Sequence[nn.Module],
    materialise: Callable[[nn.Module], None],
    world_size: int,
    device: torch.device,
    collective_limit_s: float,
) -> Cut:
    """Collective over the world. Cut `model`, then fill it: `materialise` sees the sharded parameters, so no rank ever holds the whole.

    `units` are the submodules that are gathered together, in the order of the forward (the model's own list).
    """
    mesh = build_mesh(parallel, world_size=world_size, device_type=device.type, collective_limit_s=collective_limit_s)
    if mesh is not None:
        return Cut(module=model, forward=model, _wrapped=_shard(model, units, mesh=mesh, materialise=materialise))
    materialise(model)
    if world_size == 1:
        return Cut(module=model, forward=model, _wrapped=None)
    replicated = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank initialises or restores the same bits by itself
    )
    replicated.register_comm_hook(None, lambda _, bucket: _sum_bucket(bucket))
    return Cut(module=model, forward=replicated, _wrapped=replicated)


def _shard(model: nn.Module, units: Sequence[nn.Module], *, mesh: DeviceMesh, materialise: Callable[[nn.Module], None]) -> FSDPModule:
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    materialise(model)
    assert isinstance(model, FSDPModule)  # fully_shard changed its class
    return model


def _sum_bucket(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])
