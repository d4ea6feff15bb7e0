"""Forward and backward of a step's atoms, one after the other. A pipeline runs them by its own schedule instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from surefoot.parallel.gauges import Gauges
from surefoot.parallel.reductions import Reductions
from surefoot.parallel.sharded import begin_micro_step, release
from surefoot.tensors.batch import Batch


class Sums(Protocol):
    """Scalars summed over live tokens: `nats` is reported, detached; `objective` carries the graph."""

    @property
    def nats(self) -> torch.Tensor: ...

    @property
    def objective(self) -> torch.Tensor: ...


Loss = Callable[[torch.Tensor, Batch], Sums]
"""logits_BSV and the atom they are of."""


class Runner(Protocol):
    """How the atoms of one step are computed on this rank. `start` is called before each atom's forward: its random streams."""

    def run(self, atoms: Sequence[Batch], *, start: Callable[[Batch], None], loss: Loss) -> torch.Tensor:
        """Collective over the grid. Adds the gradient of the sum over live tokens into `.grad`; this rank's nats, float64."""
        ...

    def evaluate(self, atoms: Sequence[Batch], *, loss: Loss) -> torch.Tensor:
        """Collective over the grid. This rank's nats, float64; changes nothing."""
        ...

    def logits(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        """Collective over the grid. Whole logits_BSV on every rank, without a graph."""
        ...


@dataclass(frozen=True)
class Sequential:
    """The whole forward on this rank. `forward` is what is called: the module, or its wrapper that reduces gradients.

    Under full sharding parameters are freed after each use, or (`frees_parameters` off) after the last backward of the step.
    """

    forward: Callable[..., torch.Tensor]
    device: torch.device
    autocast: AbstractContextManager[Any]
    reduces_each_micro_step: bool = False
    frees_parameters: bool = True
    reductions: Reductions | None = None
    gauges: Gauges | None = None

    def run(self, atoms: Sequence[Batch], *, start: Callable[[Batch], None], loss: Loss) -> torch.Tensor:
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        gauges = self.gauges or Gauges(device=self.device)
        gauges.begin_pass()
        for index, atom in enumerate(atoms):
            with self._micro_step(is_last=index + 1 == len(atoms)):
                with gauges.forward():
                    start(atom)
                    sums = self._compute(atom, loss, forward=self.forward)
                with gauges.backward():
                    sums.objective.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward unannotated
            nats += sums.nats
        return nats

    def evaluate(self, atoms: Sequence[Batch], *, loss: Loss) -> torch.Tensor:
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for atom in atoms:
                nats += self._compute(atom, loss, forward=self._without_wrapper()).nats
        self._release()
        return nats

    def logits(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits_BSV = self._without_wrapper()(tokens_BS, positions_BS, doc_ids_BS)
        self._release()
        return logits_BSV.full_tensor() if isinstance(logits_BSV, DTensor) else logits_BSV

    def _compute(self, atom: Batch, loss: Loss, *, forward: Callable[..., torch.Tensor]) -> Sums:
        here = atom.to(self.device)
        with self.autocast:
            return loss(forward(here.tokens_BS, here.positions_BS, here.doc_ids_BS), here)

    def _without_wrapper(self) -> Callable[..., torch.Tensor]:
        """DDP would send buffers around in a forward that has no backward."""
        return self.forward.module if isinstance(self.forward, DistributedDataParallel) else self.forward

    def _release(self) -> None:
        if isinstance(self.forward, FSDPModule):
            release(self.forward)

    @contextmanager
    def _micro_step(self, *, is_last: bool) -> Iterator[None]:
        """Gradients stay local until the micro-step that reduces them, overlapped with its backward."""
        reduces = self.reduces_each_micro_step or is_last
        if isinstance(self.forward, DistributedDataParallel) and not reduces:
            with self.forward.no_sync():
                yield
            return
        if isinstance(self.forward, FSDPModule):
            begin_micro_step(self.forward, frees_parameters=self.frees_parameters, reduces=reduces, is_last=is_last)
        with self.reductions.beside_backward() if self.reductions else nullcontext():
            yield
