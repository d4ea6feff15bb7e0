"""A run that is told what to do with each step: how a replay takes the decisions of the run that it repeats. No torch.

A skip whose cause was a fault that is over would not be made again, and everything after it would be something else. So what was decided
wins over what is measured, and no detector acts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.core.records import Proceed, Signals, SkipUpdate
from surefoot.heal.policy import clip_scale


@dataclass(frozen=True, slots=True)
class Script:
    """What was decided, by step. `rates` are (step, factor): what learning rates are multiplied by from that step on; `rotations` are
    (step, by how many ranks atoms have moved on from there). Both in the order of steps, and the last one holds.
    """

    skips: Mapping[int, SkipUpdate] = field(default_factory=dict)
    rates: Sequence[tuple[int, float]] = ()
    rotations: Sequence[tuple[int, int]] = ()

    def forced(self, step: int) -> SkipUpdate | Proceed | None:
        """What is done with a step whatever was measured; None to update it, clipped as it must be."""
        return self.skips.get(step)

    def action(self, signals: Signals, *, max_grad_norm: float, gradient_divisor: float) -> SkipUpdate | Proceed:
        """What all ranks do with the step that `signals` were taken in. Without a live token there is nothing to update with."""
        forced = self.forced(signals.step + 1)
        if forced is None and not signals.num_live_tokens:
            return SkipUpdate("no_live_tokens", "no token of this step is live")
        return forced or Proceed(clip_scale(signals, max_grad_norm=max_grad_norm, gradient_divisor=gradient_divisor))

    def rate_factor(self, step: int) -> float:
        return next((factor for first, factor in reversed(self.rates) if first <= step), 1.0)

    def rotation(self, step: int) -> int:
        return next((rotation for first, rotation in reversed(self.rotations) if first <= step), 0)

    def to_json(self) -> dict[str, Any]:
        skips = {str(step): asdict(skip) for step, skip in self.skips.items()}
        return {"skips": skips, "rates": [list(pair) for pair in self.rates], "rotations": [list(pair) for pair in self.rotations]}


def script_from_json(told: Mapping[str, Any]) -> Script:
    """What `Script.to_json` said."""
    return Script(
        skips={int(step): SkipUpdate(**skip) for step, skip in told["skips"].items()},
        rates=tuple((int(step), float(factor)) for step, factor in told["rates"]),
        rotations=tuple((int(step), int(rotation)) for step, rotation in told["rotations"]),
    )


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """What the ranks of a replay are told: compute up to step `last_step`, and look at the steps from `first_step` on. What lies between a
    start and that is only gone through."""

    first_step: int
    last_step: int
    script: Script = field(default_factory=Script)
    name_nonfinite: bool = False
    logits: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "script": self.script.to_json()}


def task_from_json(told: Mapping[str, Any]) -> ReplayTask:
    """What `ReplayTask.to_json` said."""
    return ReplayTask(**{**told, "script": script_from_json(told["script"])})
