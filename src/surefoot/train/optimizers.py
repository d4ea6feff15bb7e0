"""The optimizer from the config: parameter groups by what a parameter is, one pinned kernel."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.core.errors import ConfigError
from surefoot.core.functions import load_function
from surefoot.core.sections import ModelSection, OptimizerSection
from surefoot.model.mup import grows_with_width, width_factor


def build_optimizer(model: nn.Module, section: OptimizerSection, *, model_section: ModelSection | None = None) -> torch.optim.Optimizer:
    """AdamW over decayed matrices and everything else, or whatever `factory` returns. Local.

    Each group keeps the ratio of its learning rate to `section.lr` under every later `set_learning_rate`. Without `model_section` the
    parametrization is the standard one.
    """
    factor = width_factor(model_section) if model_section else 1.0
    optimizer = _from_factory(model, section) if section.factory else _adamw(model, section, factor=factor)
    for group in optimizer.param_groups:
        group["lr_ratio"] = float(group["lr"]) / section.lr if section.lr else 1.0
    return optimizer


def _adamw(model: nn.Module, section: OptimizerSection, *, factor: float) -> torch.optim.Optimizer:
    """Under mup, matrices inside blocks have a group of their own: `model.mup` says why. Then no group is left out for being empty: a
    checkpoint has the rate of each, and stages of a pipeline must agree on which that are."""
    decayed, others = split_parameters(model)
    scaled = [parameter for fqn, parameter in decayed if factor != 1.0 and grows_with_width(fqn)]
    as_configured = [parameter for fqn, parameter in decayed if factor == 1.0 or not grows_with_width(fqn)]
    groups = [
        {"params": scaled, "weight_decay": section.weight_decay * factor, "lr": section.lr / factor},
        {"params": as_configured, "weight_decay": section.weight_decay},
        {"params": [parameter for _, parameter in others], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups if factor != 1.0 else [group for group in groups if group["params"]],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=section.kernel == "fused",
        foreach=section.kernel == "foreach",
    )


Named = list[tuple[str, nn.Parameter]]


def split_parameters(model: nn.Module) -> tuple[Named, Named]:
    """(decayed, others): weight decay is for matrices; embeddings, norms and biases have none."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: Named = []
    others: Named = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 and id(parameter) not in embeddings else others).append((name, parameter))
    return decayed, others


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Local. `rate` is that of a group with ratio 1; a rate that is a tensor stays one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate * group["lr_ratio"])
        else:
            group["lr"] = rate * group["lr_ratio"]


def _from_factory(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    where = "[optimizer] factory"
    optimizer = load_function(section.factory, where=where)(model.named_parameters(), section)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{section.factory!r} returned {type(optimizer).__name__}, not a torch Optimizer", where=where)
    return optimizer
