"""What this rank alone would add to the gradient of a step: seen just before it is reduced, and then not sent.

`fully_shard` hands the whole gradient of a unit to a reduce-scatter, so there it is seen, unit by unit, and no rank ever holds more than in
a micro-step. DistributedDataParallel leaves it in `.grad` where it is told not to reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

# The interface that FSDPModule.set_custom_reduce_scatter asks for; torch exports the method but not the class.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn.parallel import DistributedDataParallel

from surefoot.parallel.running import Runner, Sequential
from surefoot.parallel.sharded import sharded_modules

See = Callable[[str, torch.Tensor], None]
"""Gets a name, the same on every rank, and this rank's gradient of what has that name."""


@contextmanager
def unreduced(runner: Runner, *, module: nn.Module, roots: Sequence[nn.Module], see: See) -> Iterator[None]:
    """Local. One backward of `runner` inside shows its gradients to `see` instead of reducing them; in the end there are none.

    `roots` are what was sharded, empty where `module` is whole on every rank. A rank that shares parameters with no other in its sharding
    group has its units shown at the end, for no reduce-scatter is made there; whole copies beside (HSDP) sum what is not theirs to sum, and
    that is thrown away too. Gradients must be cleared on the way in.
    """
    with ExitStack() as stack:
        seers = [_watch(unit, name, see, stack) for root in roots for name, unit in _named_units(root)]
        if isinstance(runner, Sequential) and isinstance(runner.forward, DistributedDataParallel):
            stack.enter_context(runner.forward.no_sync())
        try:
            yield
            for seer in seers:
                seer.see_rest()
            if not roots:
                for name, parameter in module.named_parameters():
                    if parameter.grad is not None:
                        see(name, parameter.grad)
        finally:
            for owner in (module, *roots):
                for parameter in owner.parameters():
                    parameter.grad = None


def _named_units(root: nn.Module) -> list[tuple[str, FSDPModule]]:
    assert isinstance(root, FSDPModule)  # `fully_shard` made it one
    names = {id(unit): name for name, unit in root.named_modules()}
    return [(names[id(unit)], unit) for unit in sharded_modules(root)]


def _watch(unit: FSDPModule, name: str, see: See, stack: ExitStack) -> _Seer:
    # What reduces now, to be put back: there is a public way to set it, and none to ask. None for a unit without parameters of its own.
    group = unit._get_fsdp_state()._fsdp_param_group
    seer = _Seer(name, see)
    if group is not None:
        stack.callback(unit.set_custom_reduce_scatter, group._reduce_scatter_comm)
        unit.set_custom_reduce_scatter(seer)
    return seer


class _Seer(ReduceScatter):
    """Stands where `fully_shard` reduces the gradients of one unit. It asks for the memory of the whole gradient, then of its shard."""

    def __init__(self, name: str, see: See) -> None:
        self._name = name
        self._see = see
        self._whole: torch.Tensor | None = None
        self._has_whole = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        if not self._has_whole:
            self._whole = made
        self._has_whole = not self._has_whole
        return made

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._whole = None
        self._see(self._name, input_tensor)
        output_tensor.zero_()

    def see_rest(self) -> None:
        if self._whole is not None:
            self._see(self._name, self._whole)
            self._whole = None
