"""A [model] factory whose hardware is bad, once: by the environment, so that neither config nor code differ from those of a sound run.

FAULTS is JSON: {"nan": [rank, step], "kill": [rank, step], "bad_weight": step}. A gradient becomes NaN in that step, the process is killed
in that step of the first generation.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import torch
from torch import nn

from surefoot.core.sections import ModelSection
from surefoot.model.transformer import Transformer


def build(section: ModelSection, vocab_size: int) -> nn.Module:
    model = Transformer(section, vocab_size)
    faults: dict[str, Any] = json.loads(os.environ.get("FAULTS", "{}"))
    here = int(os.environ.get("RANK", "0"))
    step = 0

    def count(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal step
        if torch.is_grad_enabled() and given[0].any():  # a phantom, such as the rehearsal at a start, holds no sample
            step += 1
        if faults.get("kill") == [here, step] and os.environ["SUREFOOT_GENERATION"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def spoil(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        if faults.get("nan") == [here, step] and os.environ["SUREFOOT_GENERATION"] == "1" and torch.is_grad_enabled():
            return output * torch.nan
        return output

    model.register_forward_pre_hook(count)
    model.get_submodule("norm").register_forward_hook(spoil)
    return model
