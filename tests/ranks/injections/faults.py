"""Faults of a training run, put in through what torch and the loop offer to everybody: hooks, the config, tensors between two steps.

A fault is a record, drawn once; `Injection` is what one rank does about it. A transient one happens once, whatever is computed again; one
that lasts is there whenever its place is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from surefoot.core.sections import RunConfig
from surefoot.guard import Guard
from surefoot.train.step import Parts

Kind = Literal[
    "nan-in-an-atom",
    "nan-of-a-sample",
    "repeated-bytes",
    "shuffled-tokens",
    "rate-not-as-told",
    "rate-as-told",
    "flipped-gradient-bit",
    "biased-contribution",
    "flipped-parameter-bit",
    "lost-moments",
    "other-seed",
]
LR_FACTOR = 30.0
LR_STEPS = 3
BIAS = 1.001
HIGH_BITS = range(28, 31)


@dataclass(frozen=True, slots=True)
class Fault:
    """`step` is the first training step (from 1) that it gets into; `rank` where it happens, -1 on all. `place` and `bit` are drawn numbers
    that pick a tensor and an element, or what of it is flipped; `row` the tokens of the sample that cannot be computed. `lasts`: a wrong
    rate comes again whenever its steps do; else it is over once the run has gone back."""

    kind: Kind
    step: int
    rank: int = -1
    place: int = 0
    bit: int = 0
    row: tuple[int, ...] = ()
    lasts: bool = False


class Injection:
    """One rank's part of a fault: hooks, and what is done between two steps."""

    def __init__(self, fault: Fault, parts: Parts, guard: Guard) -> None:
        self._fault, self._parts, self._guard = fault, parts, guard
        self._is_here = fault.rank in (-1, parts.world.rank)
        self._is_spent = self._holds_row = False
        self._newest_step = self._begun_step = 0
        if self._is_here or fault.kind == "nan-of-a-sample":
            self._hook()

    def before_step(self, parts: Parts) -> Parts:
        """Local. What the next step works with in place of `parts`."""
        fault = self._fault
        if fault.step <= self._newest_step and self._step <= self._newest_step and not fault.lasts:
            self._is_spent = True
        self._newest_step = max(self._newest_step, self._step)
        self._begun_step = self._step
        if fault.kind == "rate-as-told" and self._rate_is_wrong:
            wrong = replace(parts.config.optimizer, lr=parts.config.optimizer.lr * LR_FACTOR)
            return replace(parts, config=replace(parts.config, optimizer=wrong))
        if fault.kind == "flipped-parameter-bit" and self._strikes:
            with torch.no_grad():
                _flip(_drawn(parts.parameters, fault.place), place=fault.place, bit=fault.bit)
        return parts

    @property
    def _step(self) -> int:
        return self._guard.step + 1

    @property
    def _rate_is_wrong(self) -> bool:
        return not self._is_spent and self._fault.step <= self._step < self._fault.step + LR_STEPS

    @property
    def _strikes(self) -> bool:
        """Once, on the rank and in the step that were drawn; not in an audit, which computes atoms between two steps."""
        if self._is_spent or not self._is_here or self._begun_step != self._fault.step:
            return False
        self._is_spent = True
        return True

    def _hook(self) -> None:
        module, kind, place = self._parts.cut.module, self._fault.kind, self._fault.place
        blocks = list(module.blocks.children())  # type: ignore[union-attr]  # of our own transformer
        block = blocks[place % len(blocks)]
        if kind == "nan-in-an-atom":
            block.register_forward_hook(lambda _module, _given, out: _with_nan(out, place) if self._computes and self._strikes else None)
        elif kind == "nan-of-a-sample":
            module.register_forward_pre_hook(lambda _, given: self._look_at(given[0]))
            block.register_forward_hook(lambda _module, _given, out: _with_nan(out, place) if self._holds_row else None)
        elif kind == "rate-not-as-told":
            self._parts.optimizer.register_step_pre_hook(lambda optimizer, *_: self._change_rate(optimizer))
        elif kind == "flipped-gradient-bit":
            _on_gradient(_drawn(self._parts.parameters, place), self._flip_gradient)
        elif kind == "biased-contribution":
            module.register_forward_hook(lambda _module, _given, out: self._bias(out))

    @property
    def _computes(self) -> bool:
        """Held-out samples go through the same forward."""
        return torch.is_grad_enabled()

    def _look_at(self, tokens_BS: torch.Tensor) -> None:
        row = torch.tensor(self._fault.row)
        self._holds_row = self._computes and bool((tokens_BS == row).all(dim=1).any())

    def _change_rate(self, optimizer: torch.optim.Optimizer) -> None:
        if self._rate_is_wrong:
            for group in optimizer.param_groups:
                group["lr"] *= LR_FACTOR

    def _flip_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self._strikes:
            return None
        wrong = gradient.clone()
        _flip(wrong, place=self._fault.place, bit=None)
        return wrong

    def _bias(self, out: torch.Tensor) -> None:
        if self._computes and self._step >= self._fault.step:
            _on_gradient(out, lambda gradient: gradient * BIAS)


def config_of_rank(config: RunConfig, fault: Fault, *, rank: int) -> RunConfig:
    """What this rank believes the config to be."""
    if fault.kind == "other-seed" and rank == fault.rank:
        return replace(config, run=replace(config.run, seed=config.run.seed + 1 + fault.place))
    return config


def lose_moments(optimizer: torch.optim.Optimizer) -> None:
    """As a resume that restores the weights alone."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].zero_()


def _on_gradient(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensor.register_hook(change)  # type: ignore[no-untyped-call]  # torch leaves Tensor.register_hook unannotated


def _with_nan(out_BSD: torch.Tensor, place: int) -> torch.Tensor:
    wrong = out_BSD.clone()
    wrong.view(-1)[place % wrong.numel()] = torch.nan
    return wrong


def _drawn(parameters: list[nn.Parameter], place: int) -> nn.Parameter:
    return parameters[place % len(parameters)]


def _flip(tensor: torch.Tensor, *, place: int, bit: int | None) -> None:
    """In place: one bit of the largest of a few elements, float32, so that there is something to flip where most are zero.

    Without a `bit` one of the highest of the exponent that is not set: the value grows by 2^32 at least.
    """
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.view(-1)
    first = place % flat.numel()
    index = first + int(flat[first : first + 64].abs().argmax())
    (bits,) = struct.unpack("<I", struct.pack("<f", float(flat[index])))
    unset = [high for high in HIGH_BITS if not bits >> high & 1]
    flipped = bit if bit is not None else unset[place % len(unset)]
    (value,) = struct.unpack("<f", struct.pack("<I", bits ^ (1 << flipped)))
    flat[index] = value
