"""Randomness as arithmetic: every stream is a function of its key, never of history, rank or topology.

A draw during training is keyed by (seed, step, atom, layer, purpose); the initial value of a parameter by (seed, fqn). So a replay, another
number of ranks or another cut draws the same numbers, and there is no generator state that a restart could lose.

torch's CPU generator keeps only the low 32 bits of a seed: among n streams two coincide with probability about n^2 / 2^33. That is harmless
for dropout or sampling. Initial values, where two equal layers would matter, come from numpy's Philox instead: 64 bits of key, and the same
bits on every CPU (torch's normal sampler differs between instruction sets).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from surefoot.core.hashing import key64


def generator_for(seed: int, *parts: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Local. A fresh generator for the stream (seed, *parts); the first part names the purpose."""
    generator = torch.Generator(device)
    generator.manual_seed(key64(seed, *parts))
    return generator


@dataclass(frozen=True, slots=True)
class RandomKey:
    """The key of one atom of one step. `fold` it with a layer and a purpose to draw."""

    seed: int
    step: int
    atom: int

    def fold(self, layer: int, purpose: str, *, device: torch.device | str = "cpu") -> torch.Generator:
        """Local. The generator of (seed, step, atom, layer, purpose); asking twice starts the same stream twice."""
        return generator_for(self.seed, "step", self.step, self.atom, layer, purpose, device=device)

    def start_streams(self) -> None:
        """Local. Start torch's own generators, of all devices, at this key: for modules that draw without asking for a stream."""
        seed = key64(self.seed, "step", self.step, self.atom)
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # the same bits, without a stack formatted for each kind of device that is not there: 0.7 ms an atom
            torch.default_generator.manual_seed(seed)


@dataclass(frozen=True, slots=True)
class Normal:
    """Initial values from a normal distribution around 0."""

    std: float


@dataclass(frozen=True, slots=True)
class Constant:
    """The same initial value everywhere."""

    value: float


InitRule = Normal | Constant


def initial_values(seed: int, fqn: str, *, shape: torch.Size, rule: InitRule) -> torch.Tensor:
    """Local. The whole float32 CPU tensor that parameter `fqn` starts from: a function of (seed, fqn, shape, rule) alone."""
    if isinstance(rule, Constant):
        return torch.full(shape, rule.value)
    stream = np.random.Generator(np.random.Philox(key=key64(seed, "init", fqn)))
    return torch.from_numpy(stream.standard_normal(tuple(shape), dtype=np.float32)).mul_(rule.std)


def initialise(module: nn.Module, *, seed: int, rule_for: Callable[[str], InitRule]) -> None:
    """Local, on any topology. Fill every parameter of `module` by name; a tied one under its first name.

    A DTensor gets its own part of the same whole tensor, so the bits do not depend on the mesh. Parameters must have memory already. The
    peak is one whole tensor in float32 on the CPU, beside the model.
    """
    with torch.no_grad():
        for fqn, parameter in module.named_parameters():
            values = initial_values(seed, fqn, shape=parameter.shape, rule=rule_for(fqn))
            if isinstance(parameter, DTensor):
                # src_data_rank=None: every rank cuts its own copy; nothing is sent.
                part = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(part.to_local())
            else:
                parameter.copy_(values)
