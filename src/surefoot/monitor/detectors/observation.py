"""What the detectors are told of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from surefoot.core.records import Signals


@dataclass(frozen=True, slots=True)
class Observation:
    """One step, or one line of a file. nan and empty stand for what was not measured.

    `rank_losses` and `rank_norms` are sums over each rank's `rank_tokens`, as RankSignals has them. `rebased`: a stage, batch, mixture or
    schedule begins with this step, so what came before is no measure for it.
    """

    step: int
    loss: float
    grad_norm: float = math.nan
    lr: float = math.nan
    lr_applied_ratio: float = math.nan
    num_nonfinite: int = 0
    num_live_tokens: int = 1
    rank_losses: tuple[float, ...] = ()
    rank_norms: tuple[float, ...] = ()
    rank_tokens: tuple[int, ...] = ()
    update_ratios: Mapping[str, float] = field(default_factory=dict)
    probes: Mapping[str, float] = field(default_factory=dict)
    rebased: bool = False


def observation_of(signals: Signals, *, step: int, rebased: bool = False) -> Observation:
    """What `signals` say of the step that will be the `step`-th: signals carry the number of those that are finished."""
    return Observation(
        step=step,
        loss=signals.loss,
        grad_norm=signals.grad_norm,
        lr=signals.lr,
        lr_applied_ratio=signals.lr_applied_ratio,
        num_nonfinite=signals.num_nonfinite,
        num_live_tokens=signals.num_live_tokens,
        rank_losses=tuple(part.loss_sum for part in signals.ranks),
        rank_norms=tuple(part.local_norm for part in signals.ranks),
        rank_tokens=tuple(part.num_live_tokens for part in signals.ranks),
        update_ratios=signals.update_ratios,
        probes=signals.probes,
        rebased=rebased,
    )
