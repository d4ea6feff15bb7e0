"""Exact sums: gradients that are the same bits however the atoms of a step are dealt to ranks, and whatever adds them up.

Every read of a parameter inside a forward is a *use*: an identity whose backward rounds the gradient of that use to a grid of its tensor
(`tensors.grid`). What follows are sums in float64, which are exact on a grid: over the uses and atoms of a rank, and by `fully_shard` over
ranks (`reduce_dtype`), once a step. Only the total is cast to float32.

The units of the grids are state, one for each tensor of the whole model: they follow from the largest gradient of the last step, so all
ranks know them, and a checkpoint has them. Where a gradient grew past its grid, or a tensor has none yet, the step is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from surefoot.core.errors import SurefootError
from surefoot.core.records import GradientBound, Redo
from surefoot.parallel.buffers import keep_buffers
from surefoot.parallel.running import Loss, Runner, Sums
from surefoot.tensors.batch import Batch
from surefoot.tensors.exact_sum import round_sum_addend
from surefoot.tensors.grid import fits, largest_of, round_to_grid, unit_exponent
from surefoot.tensors.world import World, reduce_max

HEADROOM_BITS = 6
"""A gradient may grow 64-fold from one step to the next, or the batch by a ramp, before its grid overflows. That leaves 40 bits below the
largest gradient of an atom where 64 of them are added: more than the 24 of a float32, for Adam looks at each element by itself."""

COARSE_BITS = 16
"""A gradient may shrink so many times twofold before its step is computed again with a finer grid. Of the 40 bits 24 are left then, as many
as a float32 has; after the spike of one step the next would else see its gradients rounded away."""

MAX_REDOS = 3
"""The second computation meets the gradients that its units were made for. More are needed only where a model does not repeat its bits."""

NATS_EXPONENT = -20
"""The grid of an atom's nats: a millionth of a nat, and 2^33 nats before a sum over all atoms and ranks is no longer exact."""

PHANTOM = -1
"""Instead of the index of an atom, for one that adds nothing: how many of those there are depends on the layout."""


@dataclass
class Cell:
    """What is known about the gradients of one tensor in this step: as many addends as `num_uses` says for each atom, and the largest."""

    name: str
    exponent: int | None = None
    largest: torch.Tensor | None = None
    num_uses: dict[int, int] = field(default_factory=dict)

    def take(self, gradient: torch.Tensor, *, atom: int) -> torch.Tensor:
        """Local. The gradient of one use, on the grid; as it is where the tensor has no grid yet."""
        largest = largest_of(gradient)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        if atom != PHANTOM:
            self.num_uses[atom] = self.num_uses.get(atom, 0) + 1
        return gradient if self.exponent is None else round_to_grid(gradient, exponent=self.exponent)


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, cell: Cell, atom: int) -> torch.Tensor:
        ctx.cell, ctx.atom = cell, atom
        return parameter

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return ctx.cell.take(gradient, atom=ctx.atom), None, None


class Uses:
    """The parameters of a whole model, each read through a use while one is `live`; else every read gives the parameter itself.

    Made from the whole model, before it is cut: names and number of elements are those of all stages, the same on every rank.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.cells = {name: Cell(name) for name, parameter in named.items() if parameter.requires_grad}
        self.num_elements = sum(named[name].numel() for name in self.cells)
        self.atom = PHANTOM
        self.live = False
        cell_of = {id(named[name]): cell for name, cell in self.cells.items()}
        for module in model.modules():
            owned = {name: cell_of[id(own)] for name, own in module._parameters.items() if own is not None and id(own) in cell_of}
            if owned:
                module.__dict__["exact_uses"] = (self, owned)
                kind: Any = module.__class__
                module.__class__ = _with_uses(kind, tuple(owned))

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        self.live = True
        try:
            yield
        finally:
            self.live = False


@cache
def _with_uses(kind: Any, names: tuple[str, ...]) -> type[Any]:
    """A subclass of the same name. Only the reading changes: names, `state_dict`, and who puts parameters in and out stay as they are."""
    parts = {name: _read_by_use(name) for name in names}
    return type(kind.__name__, (kind,), {**parts, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _read_by_use(name: str) -> property:
    def read(module: nn.Module) -> torch.Tensor | None:
        # `fully_shard` changes what stands there, in this dictionary; nn.Module has no other way to ask past its own attribute.
        parameter = module._parameters[name]
        uses, owned = module.__dict__["exact_uses"]
        if parameter is None or not (uses.live and torch.is_grad_enabled() and parameter.requires_grad):
            return parameter
        used: torch.Tensor = _Use.apply(parameter, owned[name], uses.atom)  # type: ignore[no-untyped-call]  # unannotated in torch
        return used

    return property(read)


@dataclass(frozen=True, slots=True)
class Seen:
    """What all ranks agreed on about one tensor: its largest addend (inf when one is not finite), their number, its largest total."""

    largest: float
    num_addends: int
    largest_total: float


@dataclass(frozen=True, slots=True)
class NextUnits:
    """`exponents` are for the next computation, of this step or of the next one. The other three ask for this one again."""

    exponents: Mapping[str, int | None]
    overflowed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    too_coarse: tuple[str, ...] = ()

    @property
    def must_redo(self) -> bool:
        return bool(self.overflowed or self.unknown or self.too_coarse)


def next_units(exponents: Mapping[str, int | None], seen: Mapping[str, Seen]) -> NextUnits:
    """Pure. From the units of this computation and what it met.

    A gradient that is not finite is no overflow: the step will be skipped, and says nothing about the units. A tensor whose gradient is all
    zero keeps its unit, or goes on without: on no grid at all, 0 is exact.
    """
    if not all(math.isfinite(tensor.largest) for tensor in seen.values()):
        return NextUnits(dict(exponents))
    nonzero = {name: tensor for name, tensor in seen.items() if tensor.largest > 0}
    following = dict(exponents)
    for name, tensor in nonzero.items():
        following[name] = unit_exponent(tensor.largest, num_addends=tensor.num_addends, headroom_bits=HEADROOM_BITS)
    known = {name: exponent for name in nonzero if (exponent := exponents[name]) is not None}
    overflowed = (name for name, unit in known.items() if not fits(seen[name].largest, num_addends=seen[name].num_addends, exponent=unit))
    too_coarse = (name for name, unit in known.items() if unit - (following[name] or 0) > COARSE_BITS)
    return NextUnits(following, tuple(overflowed), tuple(name for name in nonzero if name not in known), tuple(too_coarse))


class ExactSums:
    """A NumericsPort: the units, which are state, and what the last step said. Equal on all ranks."""

    def __init__(self, names: Sequence[str], *, num_elements: int) -> None:
        self.exponents: dict[str, int | None] = dict.fromkeys(names)
        self.bound = GradientBound(largest=0.0, num_elements=num_elements, num_nonfinite=0)
        self._redos: list[Redo] = []

    def state_dict(self) -> dict[str, Any]:
        return {"exponents": dict(self.exponents)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """A tensor that the state does not know, as after a run with float sums, begins without a unit."""
        known = state_dict.get("exponents", {})
        self.exponents = {name: known.get(name) for name in self.exponents}

    def take_redos(self) -> list[Redo]:
        """What was computed again since the last call."""
        taken, self._redos = self._redos, []
        return taken

    def note(self, redo: Redo) -> None:
        self._redos.append(redo)


@dataclass(frozen=True, slots=True)
class _OnGrid:
    """`Sums` whose nats are on the grid of nats: `nats` of several add up to the same bits in any order."""

    nats: torch.Tensor
    objective: torch.Tensor


class ExactRunner:
    """Another runner's passes, repeated until every gradient fits its grid. The step sees one of them.

    Sharded parameters come out of the last backward reduced, from float64 sums of `fully_shard`. Whole ones, on a single rank, are summed
    in float64 here: what autograd left in `.grad` is taken away before the next atom's forward.
    """

    def __init__(self, inner: Runner, *, module: nn.Module, roots: Sequence[nn.Module], uses: Uses, sums: ExactSums, world: World) -> None:
        self._inner = inner
        self._module = module
        self._uses = uses
        self._sums = sums
        self._world = world
        self._totals: dict[nn.Parameter, torch.Tensor] = {}
        self._reduced_units: set[int] = set()
        self._observer: Callable[[list[torch.Tensor]], None] | None = None
        self._observed: list[torch.Tensor] = []
        self._num_atoms = 0
        self._is_whole = not roots
        self._not_gathered_yet: list[FSDPModule] = []
        for root in roots:
            for name, unit in root.named_modules():
                if isinstance(unit, FSDPModule):
                    self._not_gathered_yet.append(unit)
                    unit.set_all_reduce_hook(partial(self._reduced, name, id(unit)))

    def watch_totals(self, observer: Callable[[list[torch.Tensor]], None]) -> None:
        """For tests and audits: gets copies of each step's float64 totals, as they were before the cast to float32.

        On a single rank they are whole; else they are this rank's flat shards, with zeros as padding.
        """
        self._observer = observer

    def run(self, atoms: Sequence[Batch], *, start: Callable[[Batch], None], loss: Loss) -> torch.Tensor:
        self._gather_once()
        put_back_buffers = keep_buffers(self._module)
        for num_redos in range(MAX_REDOS + 1):
            nats = self._pass(atoms, start=start, loss=loss)
            seen = self._agree_seen()
            units = next_units(self._sums.exponents, seen)
            if not units.must_redo:
                self._accept(units, seen)
                if self._observer is not None:
                    self._observer(self._observed)
                return nats
            self._sums.exponents = dict(units.exponents)
            if units.overflowed:
                self._sums.note(Redo(reason=_overflow_words(units.overflowed, seen)))
            elif units.too_coarse:
                self._sums.note(Redo(reason=_coarse_words(units.too_coarse, seen), rule="grid_too_coarse"))
            if num_redos < MAX_REDOS:
                self._clear_gradients()
                put_back_buffers()
        unsuited = units.overflowed or units.unknown or units.too_coarse
        what = f"after {MAX_REDOS} repetitions the gradient of {_first(unsuited)} still does not fit its grid"
        hint = "the same atoms gave other gradients each time: look for what is random or kept beside buffers and torch's generators"
        raise SurefootError(what, where="[numerics] sums = exact", hint=hint)

    def evaluate(self, atoms: Sequence[Batch], *, loss: Loss) -> torch.Tensor:
        return self._inner.evaluate(atoms, loss=_nats_on_grid(loss))

    def logits(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        return self._inner.logits(tokens_BS, positions_BS, doc_ids_BS)

    def _pass(self, atoms: Sequence[Batch], *, start: Callable[[Batch], None], loss: Loss) -> torch.Tensor:
        for name, cell in self._uses.cells.items():
            cell.exponent, cell.largest, cell.num_uses = self._sums.exponents[name], None, {}
        self._reduced_units.clear()
        self._observed = []
        self._num_atoms = max((atom.atom + 1 for atom in atoms if not atom.is_phantom), default=0)

        def start_atom(atom: Batch) -> None:
            if self._is_whole:
                self._take_whole_gradients()
            self._uses.atom = PHANTOM if atom.is_phantom else atom.atom
            start(atom)

        with self._uses.in_forward():
            nats = self._inner.run(atoms, start=start_atom, loss=_nats_on_grid(loss))
        if self._is_whole:
            self._take_whole_gradients()
            self._hand_out_totals()
        return nats

    def _gather_once(self) -> None:
        """Collective over the sharding ranks. What `fully_shard` does at the first gathering it does here, where no read is a use: it reads
        its parameters as attributes, and keeps what it gets."""
        while self._not_gathered_yet:
            unit = self._not_gathered_yet.pop(0)
            unit.unshard()
            unit.reshard()

    def _take_whole_gradients(self) -> None:
        for parameter in self._module.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if parameter in self._totals:
                self._totals[parameter].add_(gradient)
            else:
                self._totals[parameter] = gradient.to(torch.float64)
            parameter.grad = None

    def _hand_out_totals(self) -> None:
        for parameter, total in self._totals.items():
            self._observe(total)
            parameter.grad = total.to(parameter.dtype)
        self._totals.clear()

    def _reduced(self, name: str, unit: int, total: torch.Tensor) -> None:
        if unit in self._reduced_units:  # the same on every rank: each runs the same forward
            raise SurefootError(
                f"the gradient of {name or 'the model'} was reduced twice in a step, and would be added up in float32",
                where="[numerics] sums = exact",
                hint="a unit that one forward enters twice must lie inside a larger unit: let the model's shard_units() name that",
            )
        self._reduced_units.add(unit)
        if total.is_cuda:  # made on the stream of the reductions, and cast on this one: its memory must not go to the next reduction before
            total.record_stream(torch.cuda.current_stream())
        self._observe(total)

    def _observe(self, total: torch.Tensor) -> None:
        if self._observer is not None:
            self._observed.append(total.clone())

    def _agree_seen(self) -> dict[str, Seen]:
        """Collective over the loop group: one small reduction, and one read of the device."""
        cells = self._uses.cells
        totals = {
            name: largest_of(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
            for name, parameter in self._module.named_parameters()
            if (gradient := parameter.grad) is not None
        }
        zero = torch.zeros((), dtype=torch.float64, device=self._world.device)
        words = [cell.largest if cell.largest is not None else zero for cell in cells.values()]
        words += [totals.get(name, zero) for name in cells]
        measured = torch.stack([word.to(torch.float64) for word in words])
        counts = [self._num_atoms, *(max(cell.num_uses.values(), default=0) for cell in cells.values())]
        counted = torch.tensor(counts, dtype=torch.float64).to(self._world.device, non_blocking=True)
        # A reduction by maximum may lose a nan, but no infinity.
        agreed = reduce_max(self._world, torch.cat((torch.where(measured.isfinite(), measured, math.inf), counted))).tolist()
        size = len(cells)
        largest, largest_total, (num_atoms, *num_uses) = agreed[:size], agreed[size : 2 * size], map(int, agreed[2 * size :])
        seen = {name: Seen(largest[index], max(1, num_atoms * num_uses[index]), largest_total[index]) for index, name in enumerate(cells)}
        past_uses = [name for index, name in enumerate(cells) if largest_total[index] > 0 and not num_uses[index]]
        if past_uses:
            raise SurefootError(
                f"{_first(past_uses)} has a gradient, but no forward read it as an attribute of its module",
                where="[numerics] sums = exact",
                hint="read it as an attribute of the module that has it, in each forward, or leave exact sums out",
            )
        return seen

    def _accept(self, units: NextUnits, seen: Mapping[str, Seen]) -> None:
        self._sums.exponents = dict(units.exponents)
        totals = [tensor.largest_total for tensor in seen.values()]
        self._sums.bound = GradientBound(
            largest=max(totals, default=0.0),
            num_elements=self._uses.num_elements,
            num_nonfinite=sum(not math.isfinite(total) for total in totals),
        )

    def _clear_gradients(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None


def _nats_on_grid(loss: Loss) -> Loss:
    def on_grid(logits_BSV: torch.Tensor, atom: Batch) -> Sums:
        sums = loss(logits_BSV, atom)
        return _OnGrid(nats=round_sum_addend(sums.nats, exponent=NATS_EXPONENT), objective=sums.objective)

    return on_grid


def _overflow_words(names: Sequence[str], seen: Mapping[str, Seen]) -> str:
    tensor = seen[names[0]]
    return f"the gradient of {_first(names)} grew past its grid: {tensor.num_addends} addends of up to {tensor.largest:.3g}"


def _coarse_words(names: Sequence[str], seen: Mapping[str, Seen]) -> str:
    return f"the gradient of {_first(names)} shrank to {seen[names[0]].largest:.3g}, far below what its grid was made for"


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
