"""The inventory: every tensor that a restart needs, under a name that no wrapper, shard or compile changes.

`model.<fqn>` for parameters and persistent buffers, `optim.<fqn>.<slot>` for what the optimizer keeps per parameter. Tied parameters come
once, under their first name. Hyperparameters are no state: they come from the config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from surefoot.checkpoint.optimizer_state import fill_empty_state, run_empty_step
from surefoot.core.errors import Incompatible
from surefoot.core.records import ManifestTensor, Problem

WRAPPER_SEGMENTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass
class LiveState:
    """References to live tensors by key: writing into them writes into the model and its optimizer.

    `buffers` are the keys that a forward may change. `rank_0_only` are buffers that are whole on every rank and may differ (batch
    statistics): rank 0's are the ones that count, as under DistributedDataParallel, which broadcasts them. `scalars` are optimizer entries
    that are plain numbers; they stand in `tensors` as 0-d copies and go back by `put_back_scalars`.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    rank_0_only: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)

    def add(self, key: str, tensor: torch.Tensor) -> None:
        if key in self.tensors:
            raise Incompatible("two tensors have the same name", where=key, hint="rename one of the modules")
        self.tensors[key] = tensor.detach()

    def put_back_scalars(self) -> None:
        """Local. Plain numbers of the optimizer, from their loaded 0-d copies."""
        for key, (slots, slot) in self.scalars.items():
            slots[slot] = type(slots[slot])(self.tensors[key].item())


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, *, for_load: bool = False) -> LiveState:
    """Local. References to all tensors of `model` and `optimizer`.

    Parameters without optimizer state get the state that their first step would start from, so that a missing moment is missed. For
    optimizers other than Adam and AdamW that takes an empty step, made only `for_load`: all values are about to be overwritten.
    Raises Incompatible for state that has no tensor form, and for optimizer parameters that are not the model's.
    """
    live = LiveState()
    names = _collect_model(model, live)
    fill_empty_state(optimizer)
    if for_load:
        run_empty_step(optimizer)
    for parameter in _optimizer_parameters(optimizer, names):
        _collect_slots(live, f"optim.{names[id(parameter)]}", optimizer.state.get(parameter, {}))
    return live


def names_of(model: nn.Module) -> dict[int, str]:
    """Local. The name of each parameter and persistent buffer by identity; a tied one's first."""
    return _collect_model(model, LiveState())


def submodules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Local. Every submodule by the path that its parameters' names have; of a wrapper and what it wraps, the latter."""
    replicated = {path for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)}
    return {_clean_name(path, replicated): module for path, module in model.named_modules()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare_inventory(live: LiveState, stored: Iterable[ManifestTensor], *, elsewhere: Collection[str] = ()) -> list[Problem]:
    """Every difference between what the program expects and what a checkpoint holds: keys both ways, dtypes, global shapes.

    `elsewhere` are keys that other ranks expect.
    """
    found = {tensor.key: tensor for tensor in stored}
    problems = [Problem(kind="missing-tensor", tensor=key, detail="the model or optimizer needs it") for key in live.tensors.keys() - found]
    problems += [
        Problem(kind="extra-tensor", tensor=key, detail="the model or optimizer has none")
        for key in found - live.tensors.keys() - set(elsewhere)
    ]
    for key in live.tensors.keys() & found.keys():
        tensor, have = live.tensors[key], found[key]
        if dtype_name(tensor.dtype) != have.dtype:
            problems.append(Problem(kind="wrong-dtype", tensor=key, detail=f"stored {have.dtype}, expected {dtype_name(tensor.dtype)}"))
        if tuple(tensor.shape) != have.shape:
            problems.append(Problem(kind="wrong-shape", tensor=key, detail=f"stored {have.shape}, expected {tuple(tensor.shape)}"))
    return sorted(problems, key=lambda problem: problem.tensor)


def _collect_model(model: nn.Module, live: LiveState) -> dict[int, str]:
    """Adds parameters and buffers; returns the clean name of each by identity.

    `state_dict` decides what persists, and puts parameters that a forward left gathered back into shards.
    """
    replicated = {path for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)}
    names: dict[int, str] = {}
    for raw_name, tensor in model.state_dict(keep_vars=True).items():
        name = _clean_name(raw_name, replicated)
        if not isinstance(tensor, torch.Tensor):
            raise Incompatible(
                f"{type(tensor).__name__} in the module's state is no tensor", where=f"model.{name}", hint="register it as a buffer"
            )
        if id(tensor) not in names:
            names[id(tensor)] = name
            live.add(f"model.{name}", tensor)
            if not isinstance(tensor, nn.Parameter):
                live.buffers.add(f"model.{name}")
                if not isinstance(tensor, DTensor):
                    live.rank_0_only.add(f"model.{name}")
    return names


def _clean_name(raw_name: str, replicated: set[str]) -> str:
    """`raw_name` without the segments that DDP, FSDP1, torch.compile and activation checkpointing put into it."""
    kept: list[str] = []
    path: list[str] = []
    for segment in raw_name.split("."):
        if not (segment in WRAPPER_SEGMENTS or (segment == "module" and ".".join(path) in replicated)):
            kept.append(segment)
        path.append(segment)
    return ".".join(kept)


def _optimizer_parameters(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[torch.Tensor]:
    parameters: list[torch.Tensor] = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise Incompatible(
                    f"parameter {position} of group {index}, {tuple(parameter.shape)}, is not one of the model",
                    where="optimizer",
                    hint="build the optimizer after the model is wrapped, from model.parameters()",
                )
            parameters.append(parameter)
    return parameters


def _collect_slots(live: LiveState, prefix: str, slots: dict[str, Any]) -> None:
    for slot, value in slots.items():
        key = f"{prefix}.{slot}"
        if isinstance(value, torch.Tensor):
            live.add(key, value)
        elif isinstance(value, bool | int | float):
            live.add(key, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None))
            live.scalars[key] = (slots, slot)
        elif value is not None:
            raise Incompatible(f"{type(value).__name__} in the optimizer's state has no tensor form", where=key)
