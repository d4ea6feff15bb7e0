"""A [model] factory that hangs or dozes, by the environment, so that neither config nor code differ from those of a sound run.

HANG is JSON: {"spin": [rank, step]} is a loop of Python without end in that step of the first generation; {"doze": [rank, seconds]} a sleep
in its first evaluation.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from torch import nn

from surefoot.core.sections import ModelSection
from surefoot.model.transformer import Transformer


def build(section: ModelSection, vocab_size: int) -> nn.Module:
    model = Transformer(section, vocab_size)
    hang: dict[str, Any] = json.loads(os.environ.get("HANG", "{}"))
    here, generation = int(os.environ.get("RANK", "0")), os.environ.get("SUREFOOT_GENERATION", "")
    step = 0

    def count(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal step
        if not given[0].any():  # a phantom, such as the rehearsal at a start, holds no sample
            return
        if not torch.is_grad_enabled():
            rank, nap_s = hang.pop("doze", (-1, 0.0))
            time.sleep(nap_s if rank == here else 0.0)
            return
        step += 1
        while hang.get("spin") == [here, step] and generation == "1":
            pass

    model.register_forward_pre_hook(count)
    return model
