"""A spike or a divergence: what came after an onset, against the level that was frozen before it. Pure, step by step.

A run has recovered when the median of 20 losses is back at it and stays there for 50 steps. "Within 5%" would be half of a run's
progress. Whoever is not back when the time to decide comes is told by the slope: one that returns is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.robust import SIGMA_OF_MAD, median

NUM_BEFORE, NUM_BEFORE_LEAST, NUM_LEVEL = 512, 16, 32
NUM_MEDIAN, HELD_STEPS = 20, 50
NUM_SLOPE = 100
LEAST_SHARE, NUM_SIGMAS = 0.005, 3.0
MEDIAN_NOISE = 1.2533
"""Standard error of a median over that of a mean, of normal values."""

RETURN_FACTOR = 10.0
"""One that falls so that it is back within so many times the time to decide is recovering: BLOOM 104B took 2,000 steps."""

NUM_REBOUND, NUM_REBOUND_LEAST, REBOUND_SIGMAS = 50, 20, 4.0

Outcome = Literal["open", "recovered", "recovering", "diverged"]


@dataclass(frozen=True, slots=True)
class SpikeWatch:
    """`level` is where the loss stood before `onset_step`. It is what is to be reached again: a run that is ill need not go on falling
    meanwhile, and early in a run, where it falls fast, a line through the past foretells losses that no run has.

    `losses`: the newest since the onset. `within_since`: the step since which their median has been at the forecast, -1 when it is not.
    """

    rule: str
    onset_step: int
    level: float
    sigma: float
    losses: tuple[float, ...] = ()
    last_step: int = -1
    within_since: int = -1

    @property
    def tolerance(self) -> float:
        return max(LEAST_SHARE * abs(self.level), NUM_SIGMAS * self.sigma / math.sqrt(NUM_MEDIAN))

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**values, "losses": list(self.losses)}


def watch_from_json(value: Mapping[str, Any]) -> SpikeWatch:
    return SpikeWatch(**{**value, "losses": tuple(value["losses"])})


def open_watch(losses: Sequence[float], *, onset_step: int, rule: str) -> SpikeWatch | None:
    """The level from the finite `losses` before the onset, oldest first; None when they are too few.

    The noise is that around a line through them: a fall is none.
    """
    before = [loss for loss in losses[-NUM_BEFORE:] if math.isfinite(loss)]
    num = len(before)
    if num < NUM_BEFORE_LEAST:
        return None
    half = num // 2
    older, newer = median(sorted(before[:half])), median(sorted(before[half:]))
    slope = min(0.0, (newer - older) / (num / 2.0))
    start = newer - slope * (half + num - 1) / 2.0
    sigma = SIGMA_OF_MAD * median(sorted(abs(loss - start - slope * place) for place, loss in enumerate(before)))
    return SpikeWatch(rule, onset_step, median(sorted(before[-NUM_LEVEL:])), sigma)


def follow(watch: SpikeWatch, *, step: int, loss: float) -> SpikeWatch:
    """One more loss since the onset. One that is not finite breaks what was held, and enters nothing."""
    if not math.isfinite(loss):
        return replace(watch, last_step=step, within_since=-1)
    losses = (*watch.losses[-(NUM_SLOPE - 1) :], loss)
    is_within = len(losses) >= NUM_MEDIAN and median(sorted(losses[-NUM_MEDIAN:])) <= watch.level + watch.tolerance
    within_since = (watch.within_since if watch.within_since >= 0 else step) if is_within else -1
    return replace(watch, losses=losses, last_step=step, within_since=within_since)


def outcome(watch: SpikeWatch, *, decide_steps: int) -> Outcome:
    """What it is so far; open until it has recovered or the time to decide has come."""
    if watch.within_since >= 0 and watch.last_step - watch.within_since >= HELD_STEPS:
        return "recovered"
    if watch.last_step - watch.onset_step < decide_steps:
        return "open"
    if watch.within_since >= 0:
        return "recovering"
    return "recovering" if _returns(watch, within_steps=RETURN_FACTOR * decide_steps) else "diverged"


def rebound(
    before: Sequence[float], after: Sequence[float], *, resume_step: int, asks: Asks = Asks.ALERT, stride_steps: int = 1
) -> Finding | None:
    """Whether the first losses after a resume lie above the last before it: moments, step, schedule or cursor were lost on the way.

    Up to 50 of each count; None with fewer than 20, or where the medians differ by less than 4 sigma and half a per cent.
    """
    old = [loss for loss in before[-NUM_REBOUND:] if math.isfinite(loss)]
    new = [loss for loss in after[:NUM_REBOUND] if math.isfinite(loss)]
    if min(len(old), len(new)) < NUM_REBOUND_LEAST:
        return None
    level, now = median(sorted(old)), median(sorted(new))
    sigma = SIGMA_OF_MAD * median(sorted(abs(loss - level) for loss in old))
    limit = max(LEAST_SHARE * abs(level), REBOUND_SIGMAS * MEDIAN_NOISE * sigma * math.sqrt(1.0 / len(old) + 1.0 / len(new)))
    if now - level <= limit:
        return None
    told = f"the median loss of {len(new) * stride_steps} steps after the resume is {now:.4g}, of those before it {level:.4g}"
    evidence = {"before": level, "after": now, "limit": limit, "check": ["moments", "step", "schedule", "cursor"]}
    return Finding("rebound", asks, told, resume_step + 1, evidence)


def _returns(watch: SpikeWatch, *, within_steps: float) -> bool:
    """Whether the newest losses fall faster than their noise, and fast enough to be back at it in time."""
    num = len(watch.losses)
    if num < 2 * NUM_MEDIAN:
        return False
    half = num // 2
    older, newer = sorted(watch.losses[:half]), sorted(watch.losses[half:])
    fall = median(older) - median(newer)
    noise = MEDIAN_NOISE * watch.sigma * math.sqrt(2.0 / half)
    steps_per_loss = max(1.0, (watch.last_step - watch.onset_step) / max(1, num)) if num < NUM_SLOPE else 1.0
    rate = fall / (half * steps_per_loss)
    excess = median(sorted(watch.losses[-NUM_MEDIAN:])) - watch.level
    return fall > 2.0 * noise and excess <= rate * within_steps
