"""Optimizer state before the first step. A fresh optimizer has none, so a load would ask for nothing and miss nothing."""

from __future__ import annotations

from typing import Any

import torch


def fill_empty_state(optimizer: torch.optim.Optimizer) -> None:
    """Local. Adam and AdamW: give every trained parameter without state the zeros that its first step would create, bit for bit."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                optimizer.state[parameter] = _adam_zeros(parameter, group)


def run_empty_step(optimizer: torch.optim.Optimizer) -> None:
    """Local, or collective where the optimizer's own step is. Any optimizer without any state: one step of zero gradients at rate 0.

    Counters move and values may change, so this is only for state that a load overwrites next. Nothing happens when there is state
    already or a gradient is waiting.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(optimizer.state.values()) or any(parameter.grad is not None for parameter in parameters):
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


def _adam_zeros(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As torch.optim.adam.Adam._init_group makes it; compared with it in a test."""
    on_device = group["capturable"] or group["fused"]
    dtype = torch.float32 if group["fused"] or torch.get_default_dtype() != torch.float64 else torch.float64
    state = {"step": torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")}
    slots = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    return state | {slot: torch.zeros_like(parameter, memory_format=torch.preserve_format) for slot in slots}
