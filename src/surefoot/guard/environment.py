"""What else decides the bits: versions, threads, kernels, device. Recorded with every checkpoint, compared on resume."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from torch import nn

from surefoot.core.version import __version__
from surefoot.tensors.world import World, gather_json

EXACT = "exact"
"""The fact "sums" of a run in which the layout changes no bit. Other runs do not have it, nor had those before there were exact sums."""


def describe_environment(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, *, exact_sums: bool = False
) -> dict[str, object]:
    """The facts of this process that may change a bit of the result, read off the live objects. Equal on all ranks of a sane job."""
    facts: dict[str, object] = {
        "surefoot": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": world.device.type,
        "num_threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "optimizer": type(optimizer).__name__,
        "optimizer_kernel": _kernel(optimizer),
        "parameter_dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}),
        "world_size": world.size,
    }
    if exact_sums:
        facts["sums"] = EXACT
    if world.device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(world.device)
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # unannotated in torch
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]  # as above
        facts["driver"] = _driver()
        facts["allow_tf32"] = torch.backends.cuda.matmul.allow_tf32
    return facts


def gather_devices(world: World) -> dict[str, dict[str, list[object]]]:
    """Collective over the save group with accelerators, else local. {host: {rank: [local_rank, uuid]}}; empty without accelerators.

    No part of the environment: which device it is decides no bit, and each rank has another.
    """
    if world.device.type != "cuda":
        return {}
    index = world.device.index if world.device.index is not None else torch.cuda.current_device()
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    found: dict[str, dict[str, list[object]]] = {}
    mine = [socket.gethostname(), int(os.environ.get("LOCAL_RANK", index)), f"GPU-{uuid.removeprefix('GPU-')}" if uuid else ""]
    for rank, (host, *told) in enumerate(gather_json(world, mine)):
        found.setdefault(host, {})[str(rank)] = told
    return found


def changed_facts(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, list[object]]:
    """{fact: [before, now]} for what differs; a fact that only one side knows counts."""
    return {name: [before.get(name), now.get(name)] for name in sorted({*before, *now}) if before.get(name) != now.get(name)}


def _driver() -> str | None:
    """Of the NVIDIA kernel module, as it says itself."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def _kernel(optimizer: torch.optim.Optimizer) -> str:
    """Which implementation steps: "fused", "foreach", or "default" where torch chooses by itself."""
    group = optimizer.param_groups[0]
    return "fused" if group.get("fused") else "foreach" if group.get("foreach") else "default"
