"""Reductions of sharded gradients: each is measured before it is reduced, and on a CPU they go on while the backward computes.

`fully_shard` lets a reduction run beside the backward by streams of the accelerator. On a CPU it has none, and waits for each. Here a
reduction is only begun, and its result is looked at once the backward is over, or two units later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from surefoot.parallel.gauges import Gauges
from surefoot.parallel.reduce_scatter import SeenReduceScatter
from surefoot.parallel.sharded import sharded_modules

MAX_UNDER_WAY = 2
"""Units whose gradients are being reduced at one time: each holds its whole gradient twice."""


@dataclass(frozen=True)
class _Begun:
    unit: nn.Module
    work: dist.Work
    before: list[tuple[nn.Parameter, DTensor]]
    """Gradients of earlier micro-steps, which the result is added to."""


class Reductions:
    """The reductions of one model that are under way. Only inside `beside_backward` are any left so; elsewhere each is waited for."""

    def __init__(self, root: FSDPModule, *, gauges: Gauges) -> None:
        """Local. After `root` has its memory. For one sharding axis: whole copies beside (HSDP) sum a result further, and so at once."""
        self._gauges = gauges
        self._begun: deque[_Begun] = deque()
        self._open = False
        for unit in sharded_modules(root):
            unit.set_custom_reduce_scatter(SeenReduceScatter(gauges.note_contribution, _Begin(unit, self)))

    @contextmanager
    def beside_backward(self) -> Iterator[None]:
        """Collective over the sharding ranks. On the way out every gradient is what it would have been without."""
        self._open = True
        try:
            yield
            while self._begun:
                self._finish_oldest()
        finally:
            self._open = False

    def begin(self, work: dist.Work, *, unit: nn.Module, parameters: list[nn.Parameter]) -> None:
        """`fully_shard` adds a result to a gradient that is there, at once. So that is put aside, and the result is added to it later."""
        if not self._open:
            self.wait_at_once(work)
            return
        before = [(parameter, parameter.grad) for parameter in parameters if isinstance(parameter.grad, DTensor)]
        for parameter, _ in before:
            parameter.grad = None
        self._begun.append(_Begun(unit, work, before))

    def wait_at_once(self, work: dist.Work) -> None:
        with self._gauges.waiting():
            work.wait()

    def make_room(self, unit: nn.Module) -> None:
        """A unit that is used twice in one forward is reduced twice in one backward: the first of them ends before the second begins."""
        while len(self._begun) >= MAX_UNDER_WAY or any(begun.unit is unit for begun in self._begun):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        begun = self._begun.popleft()
        with self._gauges.waiting():
            begun.work.wait()
        for parameter, before in begun.before:
            assert isinstance(parameter.grad, DTensor)  # fully_shard put the result there, in the layout of the parameter
            with torch.no_grad():
                before.to_local().add_(parameter.grad.to_local())
            parameter.grad = before


def measure_contributions(root: FSDPModule, *, gauges: Gauges) -> None:
    """Local. After `root` has its memory. Its reductions stay those of `fully_shard`, and tell what they are about to reduce."""
    gauges.reductions_are_inside()
    for unit in sharded_modules(root):
        unit.set_custom_reduce_scatter(SeenReduceScatter(gauges.note_contribution))


class _Begin:
    """What is called instead of the blocking collective, for one unit."""

    def __init__(self, unit: FSDPModule, reductions: Reductions) -> None:
        assert isinstance(unit, nn.Module)  # fully_shard only changed its class
        others = {id(parameter) for inner in sharded_modules(unit)[1:] for parameter in inner.parameters()}  # type: ignore[attr-defined]
        self._unit = unit
        self._parameters = [parameter for parameter in unit.parameters() if id(parameter) not in others]
        self._reductions = reductions

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, group: dist.ProcessGroup, op: Any, async_op: bool
    ) -> None:
        self._reductions.make_room(self._unit)
        work = dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=True)
        if output_tensor.dtype != self._parameters[0].dtype:
            self._reductions.wait_at_once(work)  # the result is cast, and so read, at once
        else:
            self._reductions.begin(work, unit=self._unit, parameters=self._parameters)
