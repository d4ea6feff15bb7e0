"""The loss scale of fp16: how it moves is a pure function, what it is now is state.

fp16 flushes gradients below 6e-8 to zero and overflows at 65,504. So the loss is multiplied before the backward, as far as gradients bear
it: doubled after many good steps, halved at an overflow, whose update is skipped (arXiv 1710.03740). A scale is a power of two, so that
multiplying by it and dividing again changes no bit of what neither overflows nor underflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.core.sections import RunConfig, TrainSection


@dataclass(frozen=True, slots=True)
class ScaleRules:
    """`initial` and `minimum` are powers of two. `hysteresis`: overflows since the scale last grew, before one of them halves it."""

    initial: float
    minimum: float
    growth_interval_steps: int
    hysteresis: int


@dataclass(frozen=True, slots=True)
class ScaleState:
    """`num_good` counts updates since the scale moved or an overflow; `num_overflows` those since the scale last grew."""

    scale: float
    num_good: int = 0
    num_overflows: int = 0


def after_step(state: ScaleState, *, overflowed: bool, rules: ScaleRules) -> ScaleState:
    """Pure. The scale of the next step."""
    if overflowed:
        num_overflows = state.num_overflows + 1
        scale = max(state.scale / 2, rules.minimum) if num_overflows >= rules.hysteresis else state.scale
        return ScaleState(scale, num_overflows=num_overflows)
    if state.num_good + 1 < rules.growth_interval_steps:
        return replace(state, num_good=state.num_good + 1)
    return ScaleState(state.scale * 2)


def rules_of(train: TrainSection, *, seq_len: int) -> ScaleRules:
    """Pure. The settings are for a mean loss, as everybody's are. Ours is a sum over the tokens of an atom: as much larger, to a power of
    two, and so are its gradients."""
    unit = 2.0 ** -int(math.log2(train.micro_batch_size * seq_len))
    return ScaleRules(
        initial=train.fp16_initial_scale * unit,
        minimum=train.fp16_min_scale * unit,
        growth_interval_steps=train.fp16_growth_interval_steps,
        hysteresis=train.fp16_hysteresis,
    )


class DynamicScaler:
    """A LossScaler by the rules of the config."""

    def __init__(self, rules: ScaleRules) -> None:
        self._rules = rules
        self._state = ScaleState(rules.initial)

    @property
    def scale(self) -> float:
        return self._state.scale

    @property
    def at_minimum(self) -> bool:
        return self._state.scale <= self._rules.minimum

    def update(self, *, overflowed: bool) -> None:
        self._state = after_step(self._state, overflowed=overflowed, rules=self._rules)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """An empty state, as after a run without a scale, begins at the initial one."""
        self._state = ScaleState(**state_dict) if state_dict else ScaleState(self._rules.initial)


def build_scaler(config: RunConfig) -> DynamicScaler | None:
    """None unless `train.precision` is fp16: bf16 has the exponents of float32, so nothing of its gradients is lost or overflows."""
    return DynamicScaler(rules_of(config.train, seq_len=config.data.seq_len)) if config.train.precision == "fp16" else None
