"""A pipeline: each rank of `pp` has some pieces of the model, and the atoms of a step go through all of them by a schedule of torch's.

Gradients are summed over a step's atoms where they are, whole, and reduced over the data axes once, after the last backward: the schedule
switches the reductions of `fully_shard` off for all backwards and starts them itself.

Dim letters: B samples, S positions, D width of the residual stream, V vocabulary, N micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor

from surefoot.core.cut_plan import CutPlan
from surefoot.core.layouts import pipeline_chunks
from surefoot.core.sections import ParallelSection
from surefoot.parallel.gauges import Gauges
from surefoot.parallel.mesh import Place, shard_mesh
from surefoot.parallel.reductions import measure_contributions
from surefoot.parallel.running import Loss
from surefoot.parallel.sharded import release, shard
from surefoot.parallel.stages import Piece, own_part, part_of, pieces_of
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch

Order = Literal["1f1b", "interleaved", "zero_bubble"]

_NUM_KEPT = 2
"""Schedules that are kept: each has buffers for its micro-batches. A batch ramp does not come back to an old number of them."""


class _Schedule(Protocol):
    def step(self, *args: Any, target: Any = None, return_outputs: bool = True, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class _Step:
    """What the pieces are told before a pass: the atoms, which a piece finds by the index that its schedule hands it."""

    atoms: Sequence[Batch]
    start: Callable[[Batch], None] | None
    loss: Loss | None


class StageModule(nn.Module):
    """What a schedule calls for one piece: x_BSD or tokens_BS -> x_BSD; the last piece gives the objective of the atom, a scalar.

    `nats` collects what is reported. Without a loss the last piece gives logits_BSV.
    """

    def __init__(self, part: nn.Module, piece: Piece, *, autocast: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.part = part
        self.piece = piece
        self.nats = torch.zeros((), dtype=torch.float64)
        self._autocast = autocast
        self._step: _Step | None = None

    def begin(self, step: _Step, *, device: torch.device) -> None:
        """Local. Before a pass over the atoms of `step`."""
        self._step = step
        self.nats = torch.zeros((), dtype=torch.float64, device=device)

    def forward(self, entering: torch.Tensor, *, index: torch.Tensor) -> torch.Tensor:
        assert self._step is not None
        atom = self._step.atoms[int(index)]
        if self._step.start is not None:
            self._step.start(atom)
        with self._autocast:
            leaving: torch.Tensor = self.part(entering, atom.positions_BS, atom.doc_ids_BS)
            if not self.piece.is_last or self._step.loss is None:
                return leaving
            sums = self._step.loss(leaving, atom)
        self.nats += sums.nats
        return sums.objective


@dataclass(frozen=True)
class Link:
    """This rank among the stages: the group along `pp`, and what passes between neighbours, [B, S / `position_cuts`, `width`]."""

    group: dist.ProcessGroup
    rank: int
    size: int
    width: int
    dtype: torch.dtype
    device: torch.device
    position_cuts: int = 1

    def shape(self, tokens_BS: torch.Tensor) -> tuple[int, int, int]:
        return tokens_BS.shape[0], tokens_BS.shape[1] // self.position_cuts, self.width


class Pipeline:
    """A Runner over the pieces of this rank. `ends` are parameters that the first and the last piece both have, where this rank has one."""

    def __init__(self, stages: Sequence[StageModule], link: Link, *, order: Order, ends: Sequence[nn.Parameter], gauges: Gauges) -> None:
        self._gauges = gauges
        self._stages = list(stages)
        self._link = link
        self._order = order
        self._ends = list(ends)
        self._schedules: dict[tuple[int, tuple[int, ...]], _Schedule] = {}

    def run(self, atoms: Sequence[Batch], *, start: Callable[[Batch], None], loss: Loss) -> torch.Tensor:
        self._gauges.begin_pass()
        here = [atom.to(self._link.device) for atom in atoms]
        num_micro_batches = num_scheduled(len(here), num_stages=self._link.size, order=self._order)
        here += [_phantom_like(here[-1])] * (num_micro_batches - len(here))
        schedule = self._schedule(num_micro_batches, here[0].tokens_BS)
        self._begin(_Step(here, start, loss))
        index_N = torch.arange(num_micro_batches)
        tokens = (torch.cat([atom.tokens_BS for atom in here]),) if self._stages[0].piece.is_first else ()
        schedule.step(*tokens, index=index_N, target=index_N, return_outputs=False)
        self._sum_ends()
        return self._stages[-1].nats

    def evaluate(self, atoms: Sequence[Batch], *, loss: Loss) -> torch.Tensor:
        self._forward([atom.to(self._link.device) for atom in atoms], loss=loss)
        return self._stages[-1].nats

    def logits(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        unlabelled_BS = torch.full_like(tokens_BS, IGNORED_LABEL)
        ids_B = torch.full(tokens_BS.shape[:1], PHANTOM_SAMPLE)
        atom = Batch(tokens_BS, unlabelled_BS, positions_BS, doc_ids_BS, ids_B, num_live_tokens=0, atom=0)
        return self._share_logits(self._forward([atom], loss=None))

    def _begin(self, step: _Step) -> None:
        for stage in self._stages:
            stage.begin(step, device=self._link.device)

    def _schedule(self, num_micro_batches: int, tokens_BS: torch.Tensor) -> _Schedule:
        """Made anew for another number of micro-batches, with stages of its own: their buffers belong to it."""
        key = num_micro_batches, tuple(tokens_BS.shape)
        made = self._schedules.pop(key, None) or self._new_schedule(num_micro_batches, tokens_BS)
        self._schedules[key] = made
        while len(self._schedules) > _NUM_KEPT:
            del self._schedules[next(iter(self._schedules))]
        return made

    def _new_schedule(self, num_micro_batches: int, tokens_BS: torch.Tensor) -> _Schedule:
        """What passes is said beforehand: torch would find it out by a forward and a backward of its own, and by sending pickles."""
        stages = [
            PipelineStage(
                stage,
                stage.piece.index,
                stage.piece.num_pieces,
                self._link.device,
                input_args=tokens_BS.to("meta") if stage.piece.is_first else self._on_meta(self._link.shape(tokens_BS)),
                output_args=self._on_meta(() if stage.piece.is_last else self._link.shape(tokens_BS)),
                group=self._link.group,
            )
            for stage in self._stages
        ]
        if self._order == "1f1b":
            return Schedule1F1B(stages[0], num_micro_batches, loss_fn=_objective, scale_grads=False)
        many = ScheduleInterleaved1F1B if self._order == "interleaved" else ScheduleInterleavedZeroBubble
        return many(list(stages), num_micro_batches, loss_fn=_objective, scale_grads=False)

    def _on_meta(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._link.dtype, device="meta", requires_grad=True)

    def _forward(self, atoms: Sequence[Batch], *, loss: Loss | None) -> torch.Tensor | None:
        """Collective over the stages. One atom after the other through all pieces; what comes out of the last one, on its rank."""
        self._begin(_Step(atoms, None, loss))
        sent: list[tuple[dist.Work, torch.Tensor]] = []
        leaving: torch.Tensor | None = None
        with torch.no_grad():
            for number, atom in enumerate(atoms):
                for stage in self._stages:
                    leaving = stage(self._entering(stage, atom), index=torch.tensor(number))
                    if not stage.piece.is_last:
                        sent.append((self._send(leaving, stage), leaving))
        for work, _ in sent:
            work.wait()
        for stage in self._stages:
            assert isinstance(stage, FSDPModule)
            release(stage)
        return leaving if self._stages[-1].piece.is_last else None

    def _entering(self, stage: StageModule, atom: Batch) -> torch.Tensor:
        if stage.piece.is_first:
            return atom.tokens_BS
        entering_BSD = torch.empty(self._link.shape(atom.tokens_BS), dtype=self._link.dtype, device=self._link.device)
        dist.recv(entering_BSD, group=self._link.group, group_src=(self._link.rank - 1) % self._link.size)
        return entering_BSD

    def _send(self, leaving: torch.Tensor, stage: StageModule) -> dist.Work:
        work = dist.isend(leaving.contiguous(), group=self._link.group, group_dst=(self._link.rank + 1) % self._link.size)
        assert work is not None  # this rank is one of the group
        return work

    def _share_logits(self, logits_BSV: torch.Tensor | None) -> torch.Tensor:
        """Collective over the stages. From the last one to all."""
        link, last = self._link, self._link.size - 1
        if isinstance(logits_BSV, DTensor):
            logits_BSV = logits_BSV.full_tensor()
        shape = torch.tensor(logits_BSV.shape if logits_BSV is not None else (0, 0, 0), device=link.device)
        dist.broadcast(shape, group=link.group, group_src=last)
        if logits_BSV is None:
            shared_BSV = torch.empty(tuple(shape.tolist()), dtype=link.dtype, device=link.device)
        else:
            shared_BSV = logits_BSV.to(link.dtype).contiguous()
        dist.broadcast(shared_BSV, group=link.group, group_src=last)
        return shared_BSV

    def _sum_ends(self) -> None:
        """Collective over the first and the last stage. A parameter at both ends has the sum of both gradients, the same bits at either:
        each adds two numbers, whose order does not matter."""
        link = self._link
        peer = {0: link.size - 1, link.size - 1: 0}.get(link.rank)
        if peer is None:
            return
        for parameter in self._ends:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)  # every piece is sharded, and every parameter gets a gradient in every step
            own = gradient.to_local()
            if not own.numel():
                continue
            other = torch.empty_like(own)
            exchange = [
                dist.P2POp(dist.isend, own.contiguous(), group=link.group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=link.group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            own.add_(other)


def cut_stages(
    model: nn.Module,
    mesh: DeviceMesh,
    place: Place,
    *,
    plan: CutPlan,
    parallel: ParallelSection,
    autocast: AbstractContextManager[Any],
    sums_dtype: torch.dtype | None = None,
) -> tuple[nn.Module, list[StageModule]]:
    """Local. This rank's part of `model`, which owns its parameters under the names of the whole, and its pieces, sharded over data axes.

    Under zero_bubble parameters stay gathered from forward to backward, for its backward in two halves finds only those in the graph; the
    schedule gathers and frees whole pieces.
    """
    stage, num_stages = place.coordinates["pp"], place.sizes["pp"]
    pieces = pieces_of(plan, num_stages=num_stages, num_chunks=pipeline_chunks(parallel))[stage::num_stages]
    own = own_part(model, pieces)
    stages = [StageModule(part_of(own, piece.names), piece, autocast=autocast) for piece in pieces]
    for module in stages:
        units = [module.part.get_submodule(name) for name in plan.units if name in module.piece.names]
        shard(
            module,
            units,
            mesh=shard_mesh(mesh, place),
            frees_parameters=parallel.zero_stage == 3 and parallel.pp_schedule != "zero_bubble",
            sums_dtype=sums_dtype,
        )
    return own, stages


def build_pipeline(
    own: nn.Module,
    stages: Sequence[StageModule],
    mesh: DeviceMesh,
    place: Place,
    *,
    plan: CutPlan,
    parallel: ParallelSection,
    device: torch.device,
    gauges: Gauges,
) -> Pipeline:
    """Local. After `own` has its memory."""
    rank, size = place.coordinates["pp"], place.sizes["pp"]
    dtype = next(own.parameters()).dtype
    link = Link(mesh["pp"].get_group(), rank, size, plan.width, dtype, device, position_cuts=place.sizes["tp"])
    at_both_ends = set(plan.first) & set(plan.last) if rank in (0, size - 1) else set()
    ends = [parameter for name in sorted(at_both_ends) for parameter in own.get_submodule(name).parameters()]
    for stage in stages:
        assert isinstance(stage, FSDPModule)  # every piece is sharded
        measure_contributions(stage, gauges=gauges)
    return Pipeline(stages, link, order=parallel.pp_schedule, ends=ends, gauges=gauges)


def num_scheduled(num_atoms: int, *, num_stages: int, order: Order) -> int:
    """Local, pure. With how many micro-batches a schedule runs `num_atoms`: at least one a stage, and in equal rounds where stages have
    several pieces. The rest are phantoms."""
    number = max(num_atoms, num_stages)
    if order != "1f1b":
        while number % (number // num_stages):
            number += 1
    return number


def _phantom_like(atom: Batch) -> Batch:
    return replace(
        atom,
        tokens_BS=torch.zeros_like(atom.tokens_BS),
        labels_BS=torch.full_like(atom.labels_BS, IGNORED_LABEL),
        sample_ids_B=torch.full_like(atom.sample_ids_B, PHANTOM_SAMPLE),
        num_live_tokens=0,
    )


def _objective(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last piece has taken the loss already."""
    return output
