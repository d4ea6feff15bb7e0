"""Looks into a forward, at a cadence: activations where blocks end, attention logits, log Z; and into gradients and moments.

Hooks stand only while a step is probed, read what passes and change nothing. They look at the ordinary forward alone: a forward that is
repeated in the backward does not go through the hooks of a block, and what happens inside is looked at when the block ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from surefoot.monitor.gradients import group_sums, local_part, norms_of
from surefoot.monitor.groups import block_of, blocks_of
from surefoot.monitor.probe_figures import ACTIVATION_SUMS, GRADIENT_SUMS, LOG_Z_SUMS, MOMENT_SUMS, head_group, head_group_names
from surefoot.monitor.vector import Layout

NUM_ROWS = 64
"""Positions of a sequence that attention logits and log Z are taken at: the fused kernels give neither."""

CHUNK_ELEMENTS = 1 << 20
"""Of a tensor at a time: what looking needs beside it is some 20 bytes for each, so 20 MiB, however large the tensor is."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


@runtime_checkable
class ShowsLogits(Protocol):
    """A module that attends, called as (q_BHSE, k_BKTE, ...), and says how large its logits get."""

    num_key_heads: int

    def largest_logits(self, *given: Any, rows: torch.Tensor, **named: Any) -> torch.Tensor:
        """Local. [K]: the largest logit of the query heads that share each key head here, at the query positions `rows`."""
        ...


@runtime_checkable
class MakesLogits(Protocol):
    """A module that the logits of the model come out of. `log_z` is collective where they are cut over ranks, and bounds its memory."""

    def log_z(self, logits_BSV: torch.Tensor, *, rows: torch.Tensor) -> torch.Tensor: ...


class Probes:
    """Of one model. `sums` and `maxima` name what this rank can tell of it; names of the whole are agreed on elsewhere.

    `modules` are all submodules by clean path, `grouped` the group of each parameter. `narrow`: the format whose limits count, where it is
    not that of the tensors. `head_part`: which part of the heads this rank has, of how many.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], *, grouped: Mapping[str, str], narrow: torch.dtype | None, head_part: tuple[int, int]
    ) -> None:
        groups = blocks_of(grouped)
        self._blocks = {module: groups[name] for name, module in modules.items() if block_of(name) == name and name in groups}
        self._attentions = {
            module: groups[block]
            for name, module in modules.items()
            if isinstance(module, ShowsLogits) and (block := block_of(name)) is not None
        }
        self._heads = [module for module in modules.values() if isinstance(module, MakesLogits)]
        self._narrow = narrow
        self._head_part = head_part
        self._handles: list[RemovableHandle] = []
        self._inside = 0
        self._waiting: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        blocks = list(dict.fromkeys(self._blocks.values()))
        self.sums = [f"{kind}:{block}" for block in blocks for kind in ACTIVATION_SUMS] + (list(LOG_Z_SUMS) if self._heads else [])
        self.maxima = [f"act_max:{block}" for block in blocks]
        for module, block in self._attentions.items():
            self.maxima += head_group_names(block, module.num_key_heads)
        self.maxima = list(dict.fromkeys(self.maxima))

    @staticmethod
    def values_of_groups(groups: Sequence[str]) -> list[str]:
        """What `gradient_values` and `moment_values` tell, in their order."""
        return [f"{kind}:{group}" for kind in (*GRADIENT_SUMS, *MOMENT_SUMS) for group in groups]

    def open(self) -> None:
        """Local. From here on every forward is looked at."""
        self.close()
        for module in self._blocks:
            self._handles += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]
        for module in self._attentions:
            self._handles.append(module.register_forward_hook(self._attend, with_kwargs=True))
        for module in self._heads:
            self._handles.append(module.register_forward_hook(self._head))

    def close(self) -> None:
        """Local. What was seen and not taken is dropped."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._waiting, self._inside = [], [], 0
        self._sums, self._maxima = {}, {}

    def take(self, layout: Layout, *, device: torch.device) -> torch.Tensor:
        """Local. float64: all sums of `layout` but those of the groups, then its maxima; what was not seen here is 0, or -inf."""
        names = [name for name in layout.sums if name.partition(":")[0] not in (*GRADIENT_SUMS, *MOMENT_SUMS)]
        nothing, least = (torch.tensor(value, dtype=torch.float64, device=device) for value in (0.0, -math.inf))
        values = [self._sums.get(name, nothing) for name in names] + [self._maxima.get(name, least) for name in layout.maxima]
        self._sums, self._maxima = {}, {}
        return torch.stack([value.to(torch.float64) for value in values]) if values else torch.zeros(0, dtype=torch.float64, device=device)

    def _enter(self, *_: Any) -> None:
        self._inside += torch.is_grad_enabled()

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if not self._inside:
            return
        self._inside -= 1
        leaving = output[0] if isinstance(output, tuple | list) else output
        with torch.no_grad(), torch.autocast(leaving.device.type, enabled=False):
            self._note_activations(local_part(leaving), self._blocks[module])
            for attention, given, named in self._waiting:
                self._note_logits(attention, given, named)
        self._waiting = []

    def _attend(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
        """Looked at later: an operation in here would be one that a repeated forward does not have."""
        if self._inside:
            self._waiting.append((module, given, named))

    def _head(self, module: nn.Module, _: Any, logits_BSV: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        assert isinstance(module, MakesLogits)
        with torch.no_grad(), torch.autocast(logits_BSV.device.type, enabled=False):
            log_z = module.log_z(logits_BSV, rows=_rows(logits_BSV.shape[1], logits_BSV.device))
        self._add("log_z_n:head", log_z.new_tensor(log_z.numel()))
        self._add("log_z_sum:head", log_z.sum())

    def _note_activations(self, leaving: torch.Tensor, block: str) -> None:
        for chunk in _chunks(leaving):
            sizes = chunk.to(torch.promote_types(chunk.dtype, torch.float32)).abs()
            squares = sizes.square()
            values = (sizes.new_tensor(sizes.numel()), squares.sum(), squares.dot(squares), *_shares(sizes, self._narrow or chunk.dtype))
            for kind, value in zip(ACTIVATION_SUMS, (*values, (~sizes.isfinite()).sum()), strict=True):
                self._add(f"{kind}:{block}", value)
            self._raise(f"act_max:{block}", sizes.max())

    def _note_logits(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(module, ShowsLogits)
        part, _ = self._head_part
        largest_K = module.largest_logits(*given, rows=_rows(given[0].shape[2], given[0].device), **named)
        names = head_group_names(self._attentions[module], module.num_key_heads)
        for head, largest in enumerate(largest_K, start=part * len(largest_K)):
            self._raise(names[head_group(head, module.num_key_heads)], largest)

    def _add(self, name: str, value: torch.Tensor) -> None:
        value = value.to(torch.float64)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _raise(self, name: str, value: torch.Tensor) -> None:
        value = value.to(torch.float64)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value


def gradient_values(
    parameters: Sequence[nn.Parameter], *, groups: Sequence[int], num_groups: int, narrow: torch.dtype | None, device: torch.device
) -> torch.Tensor:
    """Local. float64 [4G], kind by kind: elements of the gradients that this rank counts, and how many of them are below the smallest
    normal number, zero, and above half the largest number of the format."""
    rows = []
    for parameter in parameters:
        assert parameter.grad is not None  # that is why it is counted
        gradient = local_part(parameter.grad)
        shares = [torch.stack(_shares(chunk.abs(), narrow or chunk.dtype)) for chunk in _chunks(gradient)]
        num_each = torch.stack(shares).sum(dim=0) if shares else torch.zeros(3, dtype=torch.int64, device=gradient.device)
        rows.append(torch.cat((num_each.new_tensor([gradient.numel()]), num_each)).double())
    return _by_group(rows, groups=groups, num_groups=num_groups, num_kinds=len(GRADIENT_SUMS), device=device)


def moment_values(
    parameters: Sequence[nn.Parameter], state: Mapping[Any, Any], *, groups: Sequence[int], num_groups: int, device: torch.device
) -> torch.Tensor:
    """Local. float64 [2G]: squares of the first moments that this rank counts, then of the second; 0 for an optimizer without Adam's."""
    moments = [[state.get(parameter, {}).get(name) for parameter in parameters] for name in _MOMENTS]
    values = []
    for of_kind in moments:
        known = [(group, local_part(moment)) for group, moment in zip(groups, of_kind, strict=True) if isinstance(moment, torch.Tensor)]
        norms_T = norms_of([moment for _, moment in known], device=device)
        values.append(group_sums(norms_T.square(), groups=[group for group, _ in known], num_groups=num_groups))
    return torch.cat(values)


def _by_group(
    rows: Sequence[torch.Tensor], *, groups: Sequence[int], num_groups: int, num_kinds: int, device: torch.device
) -> torch.Tensor:
    if not rows:
        return torch.zeros(num_kinds * num_groups, dtype=torch.float64, device=device)
    values_KT = torch.stack(list(rows), dim=1)
    return torch.cat([group_sums(values_T, groups=groups, num_groups=num_groups) for values_T in values_KT])


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """All elements, flat, at most `CHUNK_ELEMENTS` at a time; of one whose elements do not lie in a row, no more than that is copied."""
    if tensor.is_contiguous() or tensor.numel() <= CHUNK_ELEMENTS:
        yield from torch.split(tensor.reshape(-1), CHUNK_ELEMENTS) if tensor.numel() else ()
        return
    length = CHUNK_ELEMENTS // (tensor.numel() // tensor.shape[0])
    for part in torch.split(tensor, max(1, length)):
        yield from _chunks(part if length else part[0])


def _shares(sizes: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many absolute values are no normal number of `dtype` and not zero, are zero, and are above half its largest."""
    limits = torch.finfo(dtype)
    num_zero = (sizes == 0).sum()
    return (sizes < limits.tiny).sum() - num_zero, num_zero, (sizes > limits.max / 2).sum()


def _rows(num_positions: int, device: torch.device) -> torch.Tensor:
    """Spread over the sequence, its last position among them: that one meets the most keys."""
    step = -(-num_positions // NUM_ROWS)
    return torch.arange(num_positions - 1, -1, -step, device=device)
