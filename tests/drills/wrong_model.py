"""A [model] factory that goes wrong, by the environment, so that neither config nor code differ from those of a sound run.

WRONG is JSON: {"barrier": [rank, step]} calls a collective there that no other rank calls; {"raise": [rank, step]} raises there, in every
generation.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from surefoot.core.sections import ModelSection
from surefoot.model.transformer import Transformer


def build(section: ModelSection, vocab_size: int) -> nn.Module:
    model = Transformer(section, vocab_size)
    wrong: dict[str, Any] = json.loads(os.environ.get("WRONG", "{}"))
    here = int(os.environ.get("RANK", "0"))
    step = 0

    def count(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal step
        if not torch.is_grad_enabled() or not given[0].any():  # a phantom holds no sample
            return
        step += 1
        if wrong.get("barrier") == [here, step]:
            dist.barrier()
        if wrong.get("raise") == [here, step]:
            raise ValueError(f"not for the {step}th time")

    model.register_forward_pre_hook(count)
    return model
