"""Rules of the loss: single steps that stand out (tier 1), and a level that stays up (tier 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.cusum import AT_ZERO, Cusum, Limits
from surefoot.monitor.detectors.robust import SIGMA_OF_MAD, clipped, mad, median, quantum
from surefoot.monitor.detectors.thresholds import Thresholds

NUM_RECENT = 128
NUM_LEAST = 32
"""Fewer losses say nothing of their noise."""

SLACK, SLACK_SLOW = 1.0, 0.5
"""Sigmas: half of the smallest lasting rise that each sum is for."""

NUM_KEPT, LAG, NUM_REFERENCE, NUM_REFERENCE_LEAST = 576, 64, 512, 64
FOLLOWED = 0.5
REFRESH = 8
"""Losses between two baselines: what is 64 behind is no older for that, and the medians cost an eighth."""

FLOOR_SHARE = 1e-3
"""Of the level: the noise of a batch of 0.5M tokens is 1.1%, so a hundred times larger batches are above it still."""

NUM_TAIL_LEAST, TAIL_SIGMAS, TAIL_POWER, MOST_TAIL = 256, 2.7, 4, 2.0
"""The highest 2% of normal losses begin at 2.05 MAD sigmas, those of public all-reduced ones at 2 to 2.7, of Student's t with 3 degrees at
3, of a single rank at 3.3. From 2.7 on an outlier must stand out further before it acts: at 3 degrees 10 MAD sigmas are exceeded 8 times in
10,000, and 3 times so. Ten spikes of 512 move nothing."""

CLIP_SIGMAS = 8.0
"""What lies further out enters the windows at this distance: it cannot hide the next one, and a level that is here to stay is learnt."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Where a loss stood against what was expected of it, in nats. `tail`: how many times further an outlier must stand out to act."""

    value: float
    level: float
    sigma: float
    tail: float = 1.0

    @property
    def z(self) -> float:
        return (self.value - self.level) / self.sigma

    def evidence(self) -> dict[str, object]:
        return {"value": self.value, "level": self.level, "sigma": self.sigma, "tail": self.tail, "z": self.z}


@dataclass(frozen=True, slots=True)
class Baseline:
    """What tier 2 compares with: a line of `level` at the `count`-th loss that falls by `slope` a loss. `tail` as in Reading."""

    count: int
    level: float
    slope: float
    sigma: float
    tail: float


@dataclass(frozen=True, slots=True)
class LossState:
    """`values`: the newest of `count` losses. `baseline` is taken anew every `REFRESH` losses."""

    count: int = 0
    values: tuple[float, ...] = ()
    baseline: Baseline | None = None
    sustained: Cusum = AT_ZERO
    sustained_slow: Cusum = AT_ZERO


def reference_range(count: int) -> tuple[int, int]:
    """[start, end) of the losses that tier 2 compares with, of `count` so far: the newest 512 but for the last 64.

    A younger run has less: the newest half of what is older than a quarter of it, from 64 values on, so that its steep start is left
    behind soon.
    """
    end = count - min(LAG, count // 4)
    start = max(0, min(end - NUM_REFERENCE_LEAST, end // 2), end - NUM_REFERENCE)
    return start, end


def baseline_of(values: Sequence[float], *, count: int) -> Baseline | None:
    """From the newest of `count` losses; None while there are fewer than 64 to compare with.

    Of the slope between the medians of both halves half is followed beyond them: learning slows down, and without any a fall of the loss
    hides a rise for the first thousands of steps (0.1 nats: 44% found from step 1,000 to 3,500, and 80% so). None in a run that has no full
    reference yet: the start of one bends too much.
    """
    start, end = reference_range(count)
    if end - start < NUM_REFERENCE_LEAST:
        return None
    first = count - len(values)
    reference = values[start - first : end - first]
    half = len(reference) // 2
    slope = 0.0
    if len(reference) == NUM_REFERENCE:
        slope = min(0.0, (median(sorted(reference[half:])) - median(sorted(reference[:half]))) / half)
    ordered = sorted(reference)
    middle, centre = median(ordered), (len(reference) - 1) / 2.0
    deviations = sorted([abs(value - middle - slope * (place - centre)) for place, value in enumerate(reference)])
    sigma = max(SIGMA_OF_MAD * median(deviations), quantum(values[-NUM_RECENT:]), FLOOR_SHARE * abs(middle))
    level = middle + FOLLOWED * slope * (count - (start + centre))
    return Baseline(count, level, FOLLOWED * slope, sigma, tail_of(ordered))


def expected(values: Sequence[float]) -> tuple[float, float] | None:
    """(level, sigma) of the next loss from the trailing ones; None when there are too few.

    Where the loss falls, the level is that of a line: through the median of the newer half, with the slope between both halves or that
    within the newer one, whichever is less steep, since learning slows down. A loss that rises is no trend to follow. Sigma is by MAD
    from the line, at least the rounding of the figures and a thousandth of the level.
    """
    num = len(values)
    if num < NUM_LEAST:
        return None
    half = num // 2
    quarter = half + (num - half) // 2
    older, newer = median(sorted(values[:half])), median(sorted(values[half:]))
    recent = (median(sorted(values[quarter:])) - median(sorted(values[half:quarter]))) / ((num - half) / 2.0)
    slope = min(0.0, max((newer - older) / (num / 2.0), recent))
    middle = (half + num - 1) / 2.0
    start = newer - slope * middle
    if slope == 0.0:
        start = median(sorted(values))
    deviations = sorted([abs(value - start - slope * place) for place, value in enumerate(values)])
    level = start + slope * num
    return level, max(SIGMA_OF_MAD * median(deviations), quantum(values), FLOOR_SHARE * abs(level))


def tail_of(reference: Sequence[float]) -> float:
    """What heavy tails multiply the distance of an outlier that acts by, from the reference of tier 2 in order; 1 while that is short."""
    if len(reference) < NUM_TAIL_LEAST:
        return 1.0
    level = median(reference)
    sigma = SIGMA_OF_MAD * mad(reference, centre=level)
    reach = reference[-1 - len(reference) // 50] - level
    return min(MOST_TAIL, max(1.0, reach / (TAIL_SIGMAS * sigma)) ** TAIL_POWER) if sigma > 0.0 else 1.0


def read_loss(state: LossState, loss: float) -> Reading | None:
    known = expected(state.values[-NUM_RECENT:])
    tail = state.baseline.tail if state.baseline is not None else 1.0
    return Reading(loss, *known, tail) if known is not None else None


def read_level(state: LossState, loss: float) -> Reading | None:
    """Against the baseline of tier 2; None while there is none."""
    base = state.baseline
    if base is None:
        return None
    return Reading(loss, base.level + base.slope * (state.count - base.count), base.sigma)


def outlier(step: int, loss: Reading, *, norm_z: float, rules: Mapping[str, Asks], thresholds: Thresholds) -> Finding | None:
    """The gravest thing that tier 1 says of one step."""
    z = loss.z
    told = f"the loss {loss.value:.4g} is {z:.1f} sigma above {loss.level:.4g}, expected from the last {NUM_RECENT} steps"
    if z > thresholds.outlier_sigmas * loss.tail and "outlier_loss" in rules:
        return Finding("outlier_loss", rules["outlier_loss"], told, step, loss.evidence())
    if min(z, norm_z) > thresholds.joint_sigmas and "outlier_loss_and_norm" in rules:
        told = f"{told}; the gradient norm is {norm_z:.1f} sigma up"
        return Finding("outlier_loss_and_norm", rules["outlier_loss_and_norm"], told, step, {**loss.evidence(), "norm_z": norm_z})
    if z > thresholds.mild_sigmas and "outlier_loss_mild" in rules:
        return Finding("outlier_loss_mild", rules["outlier_loss_mild"], told, step, loss.evidence())
    return None


def sustained(
    state: LossState, loss: float, *, step: int, rules: Mapping[str, Asks], thresholds: Thresholds
) -> tuple[LossState, list[Finding]]:
    """Both sums of tier 2 after one more loss, and what they say."""
    reading, findings = read_level(state, loss), []
    if reading is None:
        return state, []
    limits, slow_limits = Limits(SLACK, thresholds.sustained_height), Limits(SLACK_SLOW, thresholds.sustained_slow_height)
    fast, is_up = state.sustained.add(reading.z, step=step, limits=limits)
    slow, is_slowly_up = state.sustained_slow.add(reading.z, step=step, limits=slow_limits)
    for name, speaks, cusum, height in (
        ("sustained_loss", is_up, fast, limits.height),
        ("sustained_loss_slow", is_slowly_up, slow, slow_limits.height),
    ):
        if speaks and name in rules:
            told = f"the loss has stayed above its level of {reading.level:.4g} since step {cusum.onset_step}"
            evidence = {**reading.evidence(), "cusum": cusum.total, "height": height}
            findings.append(Finding(name, rules[name], told, cusum.onset_step, evidence))
    return replace(state, sustained=fast, sustained_slow=slow), findings


def take_loss(state: LossState, loss: float, *, reading: Reading | None) -> LossState:
    """One more loss into the windows, an outlier cut to `CLIP_SIGMAS`."""
    value = loss if reading is None else clipped(loss, centre=reading.level, reach=CLIP_SIGMAS * reading.sigma)
    count, values = state.count + 1, (*state.values[-(NUM_KEPT - 1) :], value)
    baseline = baseline_of(values, count=count) if count % REFRESH == 0 else state.baseline
    return replace(state, count=count, values=values, baseline=baseline)
