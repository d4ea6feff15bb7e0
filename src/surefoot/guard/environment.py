"""What else decides the bits: versions, threads, kernels, device. Recorded with every checkpoint, compared on resume."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import numpy
import torch

from surefoot.core.sections import RunConfig
from surefoot.tensors.world import World


def describe_environment(config: RunConfig, world: World) -> dict[str, object]:
    """The facts of this process that may change a bit of the result. Equal on all ranks of a sane job."""
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": world.device.type,
        "num_threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "optimizer_kernel": config.optimizer.kernel,
        "precision": config.train.precision,
        "world_size": world.size,
    }
    if world.device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(world.device)
        facts["cuda"] = torch.version.cuda
        facts["allow_tf32"] = torch.backends.cuda.matmul.allow_tf32
    return facts


def changed_facts(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, list[object]]:
    """{fact: [before, now]} for what differs; a fact that only one side knows counts."""
    return {name: [before.get(name), now.get(name)] for name in sorted({*before, *now}) if before.get(name) != now.get(name)}
