"""Buffers of a forward that will be computed once more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def keep_buffers(module: nn.Module) -> Callable[[], None]:
    """Local. Remember all buffers below `module`; what is returned puts them back, those that were rebound meanwhile too."""
    kept = [(owner, name, buffer, buffer.clone()) for owner in module.modules() for name, buffer in owner.named_buffers(recurse=False)]

    def put_back() -> None:
        with torch.no_grad():
            for owner, name, buffer, before in kept:
                buffer.copy_(before)
                setattr(owner, name, buffer)

    return put_back
