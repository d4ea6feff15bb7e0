"""Mixed precision: bf16 or fp16 products under autocast, master weights, reductions and residual stream in float32."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)


def autocast_context(
    precision: Literal["fp32", "bf16", "fp16"], device: torch.device, *, cpu_capabilities: Mapping[str, Any] | None = None
) -> AbstractContextManager[Any]:
    """Local. What a forward and its loss run in. Make one per run and enter it again and again: it warns when made.

    `cpu_capabilities` is what `torch.cpu.get_capabilities()` says of this machine. bf16 needs no loss scaler: its range is float32's. fp16
    does, and has none here: `train.scaler` is it.
    """
    if precision == "fp32":
        return nullcontext()
    if device.type == "cpu" and not has_bf16_units(torch.cpu.get_capabilities() if cpu_capabilities is None else cpu_capabilities):
        logger.warning("bf16 on a CPU without bf16 units is emulated: a step was measured 21.6 times slower than with precision = fp32")
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Local. `x` for arithmetic that half precision is too coarse for; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def has_bf16_units(cpu_capabilities: Mapping[str, Any]) -> bool:
    """Whether the CPU multiplies bf16 by itself (AVX512-BF16, AMX, NEON or SVE BF16)."""
    return any("bf16" in name and bool(there) for name, there in cpu_capabilities.items())
