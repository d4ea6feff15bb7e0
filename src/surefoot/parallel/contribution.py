"""What this rank alone would add to the gradient of a step: seen just before it is reduced, and then not sent.

`fully_shard` hands the whole gradient of a unit to a reduce-scatter, so there it is seen, unit by unit, and no rank ever holds more than in
a micro-step. DistributedDataParallel leaves it in `.grad` where it is told not to reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from surefoot.parallel.reduce_scatter import SeenReduceScatter
from surefoot.parallel.running import Runner, Sequential
from surefoot.parallel.sharded import sharded_modules

See = Callable[[str, torch.Tensor], None]
"""Gets a name, the same on every rank, and this rank's gradient of what has that name."""


@contextmanager
def unreduced(runner: Runner, *, module: nn.Module, roots: Sequence[nn.Module], see: See) -> Iterator[None]:
    """Local. One backward of `runner` inside shows its gradients to `see` instead of reducing them; in the end there are none.

    `roots` are what was sharded, empty where `module` is whole on every rank. Whole copies beside (HSDP) sum what is not theirs to sum, and
    that is thrown away too. Gradients must be cleared on the way in.
    """
    with ExitStack() as stack:
        for name, unit in (found for root in roots for found in _named_units(root)):
            _watch(unit, name, see, stack)
        if isinstance(runner, Sequential) and isinstance(runner.forward, DistributedDataParallel):
            stack.enter_context(runner.forward.no_sync())
        try:
            yield
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


def _watch(unit: FSDPModule, name: str, see: See, stack: ExitStack) -> None:
    # What reduces now, to be put back: there is a public way to set it, and none to ask. None for a unit without parameters of its own.
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None:
        stack.callback(unit.set_custom_reduce_scatter, group._reduce_scatter_comm)
        unit.set_custom_reduce_scatter(SeenReduceScatter(partial(see, name), _send_nothing))


def _send_nothing(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, group: dist.ProcessGroup, op: Any, async_op: bool) -> None:
    output_tensor.zero_()
