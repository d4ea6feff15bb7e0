"""What a replay looks at in a step beside its figures: where the first value that is not finite comes from, and the largest attention
logits of each head. Nothing here changes a bit: tensors are read, no node is added to the graph.

Dim letters: B samples, S query positions, T key positions, H query heads, K key heads, E dims of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from surefoot.model.attention import CoreAttention, largest_logits
from surefoot.parallel.running import Loss, Runner
from surefoot.tensors.batch import PHANTOM_SAMPLE, Batch

FORWARD, BACKWARD, PARAMETER = "forward output", "backward gradient", "parameter gradient"


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """The first tensor of a rank that held a value that is not finite, in the order in which the rank computed.

    A `backward gradient` is that of the module's output: what made it comes behind the module. `samples` are the global samples of the
    atom's rows that hold such a value, or of all its rows where a tensor has no rows. Of a forward alone it is known whether what went in
    was finite. `atom` is None where the gradients of all atoms are summed.
    """

    step: int
    rank: int
    atom: int | None
    samples: tuple[int, ...]
    direction: str
    module: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    inputs_finite: bool | None = None
    parameters_finite: bool | None = None


@dataclass
class Watch:
    """What one rank saw. `step` is that of the step under way, None while nothing is looked at; `samples` are its global samples, by slot.

    `tp` is the rank among those that share the heads of a layer, in their order.
    """

    rank: int
    tp: int = 0
    first: Nonfinite | None = None
    logits: dict[tuple[int, str], list[tuple[float, int]]] = field(default_factory=dict)
    step: int | None = None
    samples: Sequence[int] = ()
    atom: Batch | None = None
    backward_atom: Batch | None = None

    def as_json(self) -> dict[str, Any]:
        """`logits` are (largest logit, sample) by head."""
        heads = [
            {"step": step, "module": name, "first_head": self.tp * len(found), "heads": found}
            for (step, name), found in self.logits.items()
        ]
        return {"rank": self.rank, "first_nonfinite": asdict(self.first) if self.first else None, "logits": heads}

    def samples_of(self, atom: Batch) -> list[int]:
        """The global sample of each row; `PHANTOM_SAMPLE` where no sample fills it."""
        first, ids = atom.atom * len(atom.sample_ids_B), atom.sample_ids_B.tolist()
        return [PHANTOM_SAMPLE if sample == PHANTOM_SAMPLE else int(self.samples[first + row]) for row, sample in enumerate(ids)]


@dataclass(frozen=True)
class WatchedRunner:
    """A runner that says which atom it is at; after a step it has the gradients looked at, as they are summed."""

    inner: Runner
    watch: Watch
    after: Callable[[], None]

    def run(self, atoms: Sequence[Batch], *, start: Callable[[Batch], None], loss: Loss) -> torch.Tensor:
        def begin(atom: Batch) -> None:
            self.watch.atom = self.watch.backward_atom = atom
            start(atom)

        nats = self.inner.run(atoms, start=begin, loss=loss)
        self.after()
        self.watch.atom = self.watch.backward_atom = None
        return nats

    def evaluate(self, atoms: Sequence[Batch], *, loss: Loss) -> torch.Tensor:
        return self.inner.evaluate(atoms, loss=loss)

    def logits(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(tokens_BS, positions_BS, doc_ids_BS)


# --- the first value that is not finite ---


def name_nonfinite(module: nn.Module, watch: Watch) -> Callable[[], None]:
    """Local. Look at everything that `module` computes; what is returned looks at the gradients of its parameters, summed over all ranks.

    The gradient of a parameter is looked at before it leaves the rank, atom by atom. Each look reads the device.
    """
    hooked: set[int] = set()
    for name, part in module.named_modules():
        part.register_forward_pre_hook(partial(_before, watch, hooked, name))
        part.register_forward_hook(partial(_after, watch, name))
    return partial(_look_at_sums, module, watch)


def _before(watch: Watch, hooked: set[int], name: str, module: nn.Module, _: object) -> None:
    """Full sharding puts the gathered parameter in the place of the shard for the forward: that one has this rank's own gradient."""
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and id(parameter) not in hooked and not isinstance(parameter, DTensor):
            hooked.add(id(parameter))
            look = partial(_look_at_own, watch, f"{name}.{key}".lstrip("."))
            parameter.register_hook(look)  # type: ignore[no-untyped-call]  # unannotated in torch


def _look_at_own(watch: Watch, name: str, gradient: torch.Tensor) -> None:
    _look(watch, gradient, direction=PARAMETER, module=name.rpartition(".")[0], tensor=name, atom=watch.backward_atom)


def _after(watch: Watch, name: str, module: nn.Module, inputs: object, output: object) -> None:
    if watch.step is None or watch.first is not None or not torch.is_grad_enabled():
        return
    atom = watch.atom
    for index, tensor in enumerate(_tensors(output)):
        word = f"output {index}"
        if _look(watch, tensor, direction=FORWARD, module=name, tensor=word, atom=atom):
            finite = all(_is_finite(given) for given in _tensors(inputs)), all(_is_finite(own) for own in module.parameters())
            assert watch.first is not None
            watch.first = replace(watch.first, inputs_finite=finite[0], parameters_finite=finite[1])
            return
        if tensor.requires_grad:
            look = partial(_look_at_gradient, watch, name, word, atom)
            tensor.register_hook(look)  # type: ignore[no-untyped-call]  # unannotated in torch


def _look_at_gradient(watch: Watch, name: str, word: str, atom: Batch | None, gradient: torch.Tensor) -> None:
    watch.backward_atom = atom
    _look(watch, gradient, direction=BACKWARD, module=name, tensor=word, atom=atom)


def _look_at_sums(module: nn.Module, watch: Watch) -> None:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            _look(watch, parameter.grad, direction=PARAMETER, module=name.rpartition(".")[0], tensor=name, atom=None)


def _look(watch: Watch, values: torch.Tensor, *, direction: str, module: str, tensor: str, atom: Batch | None) -> bool:
    """Whether this is the first one that is not finite."""
    if watch.step is None or watch.first is not None:
        return False
    values = _local(values)
    if _is_finite(values):
        return False
    watch.first = Nonfinite(
        step=watch.step,
        rank=watch.rank,
        atom=atom.atom if atom is not None else None,
        samples=_bad_rows(values, watch.samples_of(atom), has_rows=direction != PARAMETER) if atom is not None else (),
        direction=direction,
        module=module,
        tensor=tensor,
        dtype=str(values.dtype).removeprefix("torch."),
        shape=tuple(values.shape),
        num_nan=int(values.isnan().sum()),
        num_inf=int(values.isinf().sum()),
    )
    return True


def _bad_rows(values: torch.Tensor, ids: Sequence[int], *, has_rows: bool) -> tuple[int, ...]:
    if has_rows and values.ndim and values.shape[0] == len(ids):
        rows = (~torch.isfinite(values)).reshape(len(ids), -1).any(dim=1).tolist()
        ids = [sample for sample, is_bad in zip(ids, rows, strict=True) if is_bad]
    return tuple(sample for sample in ids if sample != PHANTOM_SAMPLE)


def _is_finite(tensor: torch.Tensor) -> bool:
    tensor = _local(tensor).detach()
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# --- attention logits ---


def watch_logits(module: nn.Module, watch: Watch) -> int:
    """Local. Take the largest logit of each head in each step; the number of attentions that are looked at.

    Before any soft-cap, over all queries and the keys that they see. Under tensor parallel the heads are those of this rank.
    """
    cores = [(name, part) for name, part in module.named_modules() if isinstance(part, CoreAttention)]
    for name, core in cores:
        core.register_forward_pre_hook(partial(_take_logits, watch, name), with_kwargs=True)
    return len(cores)


@torch.no_grad()
def _take_logits(watch: Watch, name: str, core: CoreAttention, given: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
    if watch.step is None or watch.atom is None or watch.atom.is_phantom:
        return
    ids = watch.samples_of(watch.atom)
    rows = [row for row, sample in enumerate(ids) if sample != PHANTOM_SAMPLE]
    largest_BH = largest_logits(given[0][rows], given[1][rows], mask_B1ST=named["mask_B1ST"][rows], scale=core.scale)
    values, indices = largest_BH.max(dim=0)
    found = [(value, ids[rows[row]]) for value, row in zip(values.tolist(), indices.tolist(), strict=True)]
    before = watch.logits.setdefault((watch.step, name), found)
    watch.logits[watch.step, name] = [max(pair, key=lambda item: item[0]) for pair in zip(before, found, strict=True)]
