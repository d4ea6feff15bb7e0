"""What the detectors remember: saved with the checkpoint, so that a resumed run judges as the uninterrupted one would."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.core.errors import Incompatible
from surefoot.monitor.detectors.advice import NUM_KEPT as NUM_ADVICE
from surefoot.monitor.detectors.advice import Advice
from surefoot.monitor.detectors.classics import ClassicState
from surefoot.monitor.detectors.cusum import Cusum
from surefoot.monitor.detectors.loss import Baseline, LossState
from surefoot.monitor.detectors.norms import NUM_KEPT as NUM_NORMS
from surefoot.monitor.detectors.norms import NormState
from surefoot.monitor.detectors.plateau import PlateauState
from surefoot.monitor.detectors.ranks import RankState
from surefoot.monitor.detectors.rates import RateState
from surefoot.monitor.detectors.robust import window_of

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class DetectorState:
    """One part per group of rules. The same on all ranks, since all are told the same."""

    loss: LossState = field(default_factory=LossState)
    norm: NormState = field(default_factory=NormState)
    ranks: RankState = field(default_factory=RankState)
    rate: RateState = field(default_factory=RateState)
    signals: Mapping[str, Advice] = field(default_factory=dict)
    classic: ClassicState = field(default_factory=ClassicState)
    plateau: PlateauState = field(default_factory=PlateauState)

    def to_json(self) -> dict[str, Any]:
        """Numbers in lists; what is not known is null. Orders of windows are not kept: they follow."""
        loss, ranks, rate, classic = self.loss, self.ranks, self.rate, self.classic
        return {
            "version": STATE_VERSION,
            "loss": [loss.count, list(loss.values), _baseline(loss.baseline), _sums([loss.sustained, loss.sustained_slow])],
            "norm": [list(self.norm.logs.values), _sums([self.norm.level])],
            "ranks": [
                *(ranks.count, list(ranks.centres), _number(ranks.norm_spread), _number(ranks.loss_spread)),
                *(list(ranks.above), list(ranks.below), list(ranks.onset_steps), list(ranks.named)),
            ],
            "rate": [rate.step, _number(rate.lr), rate.growth],
            "signals": {name: [list(one.values.values), _sums([one.cusum]), one.is_burst] for name, one in self.signals.items()},
            "plateau": [list(self.plateau.losses), list(self.plateau.blocks), self.plateau.is_told],
            "classic": [list(classic.losses), list(classic.norms), classic.spike_step, _number(classic.before)],
        }


def state_from_json(value: Mapping[str, Any]) -> DetectorState:
    """What `to_json` gave; an empty object is a fresh state. Raises Incompatible for one of a newer release."""
    if not value:
        return DetectorState()
    if value.get("version") != STATE_VERSION:
        what = f"detector state of version {value.get('version')}, this release reads {STATE_VERSION}"
        raise Incompatible(what, where="monitor.detectors", hint="go on with the release that wrote it")
    count, losses, baseline, (fast, slow) = value["loss"]
    logs, (level,) = value["norm"]
    num, centres, norm_spread, loss_spread, *sums = value["ranks"]
    step, lr, growth = value["rate"]
    block, blocks, is_told = value["plateau"]
    old_losses, old_norms, spike_step, before = value["classic"]
    return DetectorState(
        loss=LossState(int(count), tuple(losses), Baseline(*baseline) if baseline else None, _cusum(fast), _cusum(slow)),
        norm=NormState(window_of(logs, size=NUM_NORMS), _cusum(level)),
        ranks=RankState(
            int(num),
            tuple(centres),
            _known(norm_spread),
            _known(loss_spread),
            *(tuple(one) for one in sums),
        ),
        rate=RateState(int(step), _known(lr), float(growth)),
        signals={name: _advice(*parts) for name, parts in value["signals"].items()},
        classic=ClassicState(tuple(old_losses), tuple(old_norms), int(spike_step), _known(before)),
        plateau=PlateauState(tuple(block), tuple(blocks), bool(is_told)),
    )


def _advice(values: Sequence[float], sums: Sequence[Sequence[float]], is_burst: bool = False) -> Advice:
    return Advice(window_of(values, size=NUM_ADVICE), _cusum(sums[0]), bool(is_burst))


def _baseline(baseline: Baseline | None) -> list[float] | None:
    return [baseline.count, baseline.level, baseline.slope, baseline.sigma, baseline.tail] if baseline is not None else None


def _sums(cusums: Sequence[Cusum]) -> list[list[float]]:
    return [[cusum.total, cusum.onset_step, cusum.told] for cusum in cusums]


def _cusum(value: Sequence[float]) -> Cusum:
    total, onset_step, told = value
    return Cusum(float(total), int(onset_step), int(told))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)
