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
    if device.type == "cpu" and not has_units(precision, torch.cpu.get_capabilities() if cpu_capabilities is None else cpu_capabilities):
        slower = {"bf16": "21.6", "fp16": "19.5"}[precision]
        logger.warning(
            "%s on a CPU without %s units is emulated: a step was measured %s times slower than with precision = fp32",
            *(precision, precision, slower),
        )
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Local. `x` for arithmetic that half precision is too coarse for; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def has_units(precision: Literal["bf16", "fp16"], cpu_capabilities: Mapping[str, Any]) -> bool:
    """Whether the CPU multiplies it by itself (AVX512, AMX, NEON or SVE). F16C is none: it converts, and multiplies in float32."""
    return any(precision in name and bool(there) for name, there in cpu_capabilities.items())
