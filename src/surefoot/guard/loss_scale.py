"""A foreign loop's torch GradScaler as a LossScaler: the loop multiplies its loss by it, and the guard does all the rest."""

from __future__ import annotations

from typing import Any

import torch

from surefoot.core.errors import ConfigError
from surefoot.core.ports import LossScaler
from surefoot.core.sections import RunConfig

_MINIMUM = 2.0**-14
"""torch's scaler has none. Below this a gradient of 1 is no normal number of fp16 any more: an overflow then is none of the scale's."""


class TorchScaler:
    """Moves a GradScaler by its own factors and interval, through its state: its `update` asks for gradients that it looked at itself.

    What it holds is read once, and kept on the host from then on: its scale lies on the device, where each look would wait for the
    computation, and nobody else moves it.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._state: dict[str, Any] = {}

    @property
    def scale(self) -> float:
        return float(self._known()["scale"])

    @property
    def at_minimum(self) -> bool:
        return self.scale <= _MINIMUM

    def update(self, *, overflowed: bool) -> None:
        state = self._known()
        if overflowed:
            moved = {"scale": max(state["scale"] * state["backoff_factor"], min(state["scale"], _MINIMUM)), "_growth_tracker": 0}
        elif state["_growth_tracker"] + 1 < state["growth_interval"]:
            moved = {"_growth_tracker": state["_growth_tracker"] + 1}
        else:
            moved = {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
        self.load_state_dict(state | moved)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._known())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._scaler.load_state_dict(state_dict)
            self._state = dict(state_dict)

    def _known(self) -> dict[str, Any]:
        if not self._state:
            self._state = self._scaler.state_dict()
        return self._state


def loss_scaler(given: LossScaler | torch.amp.GradScaler | None, config: RunConfig) -> LossScaler | None:
    """What the guard works with. Raises ConfigError where the precision has no use for a scale."""
    if given is None or (isinstance(given, torch.amp.GradScaler) and not given.is_enabled()):
        return None
    if config.train.precision == "bf16":
        what = "a loss scaler was handed over, and train.precision is bf16: it has the exponents of float32, so there is nothing to scale"
        raise ConfigError(what, where="Guard(scaler=...)", hint='leave the scaler out, or set train.precision = "fp16"')
    return TorchScaler(given) if isinstance(given, torch.amp.GradScaler) else given
