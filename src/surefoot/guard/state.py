"""TrainState: everything that a restart needs, and the only mutable record of the house."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from surefoot.core.ports import DataPort
from surefoot.heal.policy import HealState


@dataclass
class TrainState:
    """`step` counts finished training steps. `attempt` grows at every resume and roll-back and never goes back.

    `updates` counts optimizer updates that really happened; it moves only in `applied`, so a snapshot can prove that none ran meanwhile.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: DataPort
    step: int = 0
    attempt: int = 1
    tokens: int = 0
    updates: int = 0
    loss: float | None = None
    heal: HealState = field(default_factory=HealState)

    def extras(self) -> dict[str, Any]:
        """The state that is not tensors, as JSON."""
        return {
            "loop": {"step": self.step, "tokens": self.tokens, "updates": self.updates},
            "monitor": {"heal": asdict(self.heal)},
            "cursor": dict(self.data.cursor()),
        }

    def take_extras(self, extras: dict[str, Any]) -> None:
        """Go on from saved extras. `data.seek` raises DataError when the data is not the one of the checkpoint."""
        self.step = int(extras["loop"]["step"])
        self.tokens = int(extras["loop"]["tokens"])
        self.updates = int(extras["loop"]["updates"])
        self.heal = HealState(**extras["monitor"]["heal"])
        self.data.seek(extras["cursor"])
