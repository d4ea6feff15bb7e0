"""TrainState: everything that a restart needs, and the only mutable record of the house."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from surefoot.core.errors import Incompatible
from surefoot.core.ports import DataPort, LossScaler, NumericsPort, Stateful
from surefoot.core.strict_json import canonical
from surefoot.guard.monitor_state import MonitorState, monitor_state_from_json


@dataclass
class TrainState:
    """`step` counts finished training steps. `attempt` grows at every resume and roll-back and never goes back.

    `updates` counts optimizer updates that really happened; it moves only in `applied`, so a snapshot can prove that none ran meanwhile.
    `canary` is the held-out loss of exactly this state, where it was evaluated. `last_clean_audit` is the step of the newest audit that
    found nothing, 0 before any. `numerics` is there where sums are exact, `scaler` where the loss is scaled.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: DataPort
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    step: int = 0
    attempt: int = 1
    tokens: int = 0
    updates: int = 0
    loss: float | None = None
    canary: float | None = None
    last_clean_audit: int = 0
    monitor: MonitorState = field(default_factory=MonitorState)
    numerics: NumericsPort | None = None
    scaler: LossScaler | None = None

    @property
    def loss_scale(self) -> float:
        """What the gradients of this step are too large by, beside their divisor."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def extras(self) -> dict[str, Any]:
        """The state that is not tensors, as JSON."""
        return {
            "loop": {"step": self.step, "tokens": self.tokens, "updates": self.updates, "rates": self._rates()},
            "monitor": {**self.monitor.as_json(), "last_clean_audit": self.last_clean_audit},
            "cursor": dict(self.data.cursor()),
            "extra": {name: _json_state(name, part) for name, part in self.extra.items()},
            "canary": self.canary,
            **({"numerics": self.numerics.state_dict()} if self.numerics is not None else {}),
            **({"scaler": self.scaler.state_dict()} if self.scaler is not None else {}),
        }

    def _rates(self) -> list[float]:
        """The learning rate of each group: schedules in chained form start from it. The rest comes from the loop's own config."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _rates_from(self, saved: Sequence[float]) -> Sequence[float]:
        """Rank 0 saved those of its own groups: a stage of a pipeline may have other groups than the stage, or the whole, that goes on."""
        num_groups = len(self.optimizer.param_groups)
        if len(saved) != num_groups and len(set(saved)) != 1:
            raise Incompatible(
                f"the checkpoint has different learning rates for {len(saved)} parameter groups, this optimizer has {num_groups} groups",
                where="optimizer.param_groups",
                hint="give the optimizer the same groups on every rank and layout, empty ones too",
            )
        return saved if len(saved) == num_groups else [saved[0]] * num_groups

    def take_extras(self, extras: dict[str, Any]) -> None:
        """Go on from saved extras. `data.seek` raises DataError when the data is not the one of the checkpoint."""
        self.step = int(extras["loop"]["step"])
        self.tokens = int(extras["loop"]["tokens"])
        self.updates = int(extras["loop"]["updates"])
        self.monitor = monitor_state_from_json(extras["monitor"])
        self.last_clean_audit = int(extras["monitor"].get("last_clean_audit", 0))
        for group, rate in zip(self.optimizer.param_groups, self._rates_from(extras["loop"]["rates"]), strict=True):
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
        if self.extra.keys() != extras["extra"].keys():
            raise Incompatible(
                f"the checkpoint has the extra state of {sorted(extras['extra'])}, this loop hands over {sorted(self.extra)}",
                where="Guard(extra=...)",
                hint="hand over the same parts as when it was saved",
            )
        for name, part in self.extra.items():
            part.load_state_dict(extras["extra"][name])
        if self.numerics is not None:
            self.numerics.load_state_dict(extras.get("numerics", {}))
        if self.scaler is not None:
            self.scaler.load_state_dict(extras.get("scaler", {}))
        self.data.seek(extras["cursor"])


def _json_state(name: str, part: Stateful) -> dict[str, Any]:
    state = part.state_dict()
    try:
        canonical(state)
    except TypeError as error:
        hint = "only JSON is kept here; put tensors into a module's buffers"
        raise Incompatible(f"its state_dict has no JSON form: {error}", where=f"extra[{name!r}]", hint=hint) from error
    return state
