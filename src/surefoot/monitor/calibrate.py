"""How often each detector is wrong on a series that went well, and how soon it sees a fault that is put into it: the same code as online.

False alarms are counted as episodes, alarms within 100 steps of each other being one. Faults are put in at random places; a place where a
detector speaks without the fault too proves nothing for it and is left out.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from surefoot.core.records import Asks
from surefoot.core.sections import MonitorSection
from surefoot.monitor.detectors import DetectorState, Observation, Thresholds, observe
from surefoot.monitor.detectors.cusum import MOST_Z
from surefoot.monitor.detectors.loss import SLACK, SLACK_SLOW, read_level, read_loss
from surefoot.monitor.detectors.norms import SLACK as SLACK_NORM
from surefoot.monitor.detectors.norms import read_norm

EPISODE_STEPS = 100
HEALTHY_STEPS = 1000
NUM_PLACES = 12
MIN_ROWS_AFTER = 200
"""Rows behind a place that a fault is put into, at least."""

ACTS = frozenset({Asks.SKIP, Asks.ROLL_BACK, Asks.PAUSE})


@dataclass(frozen=True, slots=True)
class Series:
    """A run's figures by row, steps ascending. Norms are nan where there are none, and `has_norms` says whether there are any."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]

    @property
    def has_norms(self) -> bool:
        return any(not math.isnan(norm) for norm in self.norms)

    def observation(self, row: int) -> Observation:
        norm = self.norms[row]
        return Observation(self.steps[row], self.losses[row], grad_norm=norm, num_nonfinite=int(math.isinf(norm)))


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault: what it makes of an observation `age` rows after its onset. `num_rows` is how long it is looked at."""

    name: str
    num_rows: int
    change: Callable[[Observation, int], Observation]
    on_norm: bool = False


def _lifted(by: float, rows: int = 10**9) -> Callable[[Observation, int], Observation]:
    return lambda seen, age: replace(seen, loss=seen.loss + by) if age < rows else seen


def _grown(factor: float, rows: int = 10**9) -> Callable[[Observation, int], Observation]:
    return lambda seen, age: replace(seen, grad_norm=seen.grad_norm * factor) if age < rows else seen


FAULTS: tuple[Injected, ...] = (
    Injected("loss +0.05", 200, _lifted(0.05)),
    Injected("loss +0.1", 200, _lifted(0.1)),
    Injected("loss +0.2", 200, _lifted(0.2)),
    Injected("loss +0.3 per 1000 rows", 600, lambda seen, age: replace(seen, loss=seen.loss + 3e-4 * (age + 1))),
    Injected("loss +0.3 once", 1, _lifted(0.3, 1)),
    Injected("loss +0.5 once", 1, _lifted(0.5, 1)),
    Injected("grad_norm x1.5", 200, _grown(1.5), on_norm=True),
    Injected("grad_norm x10 once", 1, _grown(10.0, 1), on_norm=True),
    Injected("loss nan once", 1, lambda seen, age: replace(seen, loss=math.nan)),
)

MEANT_FOR: Mapping[str, str] = {
    "nonfinite": "loss nan once",
    "outlier_loss": "loss +0.5 once",
    "outlier_loss_mild": "loss +0.3 once",
    "sustained_loss": "loss +0.1",
    "sustained_loss_slow": "loss +0.05",
    "grad_level": "grad_norm x1.5",
    "grad_outlier": "grad_norm x10 once",
    "norm_5x_mean_1000": "grad_norm x10 once",
    "loss_n_sigma": "loss +0.5 once",
}
"""The fault whose delay stands for a detector."""

SETTINGS: Mapping[str, str] = {
    "outlier_loss": "outlier_sigmas",
    "outlier_loss_mild": "mild_sigmas",
    "outlier_loss_and_norm": "joint_sigmas",
    "sustained_loss": "sustained_height",
    "sustained_loss_slow": "sustained_slow_height",
    "grad_level": "grad_level_height",
    "grad_outlier": "grad_outlier_factor",
    "grad_burst": "grad_burst_factor",
}
"""The setting of `[monitor]` that a threshold is a value of."""

NEVER_SUGGESTED = frozenset({"grad_burst"})
"""It skips what no healthy run shows, so a healthy run says nothing of where it should be."""

LEAST_SHARE = 0.5
"""Of the default: one run is short, and the fault that a lower threshold would find sooner costs less than the next run's false alarms."""

OF_LOSS = ("nonfinite", "outlier_loss", "outlier_loss_mild", "sustained_loss", "sustained_loss_slow", "plateau")
OF_NORM = ("outlier_loss_and_norm", "grad_level", "grad_outlier", "grad_burst")
CLASSIC_OF_LOSS, CLASSIC_OF_NORM = ("loss_n_sigma", "recover_5pct_200"), ("norm_over_clip", "norm_5x_mean_1000", "norm_100x_mean_1000")


@dataclass(frozen=True, slots=True)
class Power:
    """Of how many places with a fault a detector spoke, and how many rows after the onset, the middle one."""

    num_places: int
    num_found: int
    delay_rows: float | None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """`alarms`: the first steps of episodes in the whole series; `num_false` of them at or after the healthy start."""

    name: str
    asks: Asks | None
    alarms: tuple[int, ...]
    num_false: int
    per_10k: float
    powers: Mapping[str, Power]
    threshold: float | None
    suggested: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    num_rows: int
    num_healthy_rows: int
    from_step: int
    detectors: tuple[Calibrated, ...]
    acting: tuple[str, ...]
    acting_per_10k: float


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass over the series: alarms by rule, the state before each row that was asked for, and what thresholds are compared with."""

    alarms: Mapping[str, list[int]]
    states: Mapping[int, DetectorState]
    scores: Mapping[str, list[float]]


def healthy_start(series: Series) -> int:
    """1000 steps after the first, or the step behind a third of a shorter series."""
    return min(series.steps[0] + HEALTHY_STEPS, series.steps[len(series.steps) // 3])


def calibrate(
    series: Series,
    *,
    from_step: int,
    thresholds: Thresholds,
    budget_per_10k: float,
    acting: Mapping[str, Asks],
    seed: int = 0,
    num_places: int = NUM_PLACES,
) -> Calibration:
    """The figures of all detectors that this series has the signals for. `acting`: what rules ask for by the settings that are judged.

    `budget_per_10k` is what all suggested thresholds may cost together, in equal parts.
    """
    names = (*OF_LOSS, *CLASSIC_OF_LOSS, *((*OF_NORM, *CLASSIC_OF_NORM) if series.has_norms else ()))
    everything = dict.fromkeys(names, Asks.RECORD)
    first = next((row for row, step in enumerate(series.steps) if step >= from_step), len(series.steps))
    places = _places(len(series.steps), first=first, num=num_places, seed=seed)
    seen = _pass(series, rules=everything, thresholds=thresholds, keep=frozenset(places))
    powers = _powers(series, seen, names=names, places=places, rules=everything, thresholds=thresholds)
    num_healthy = len(series.steps) - first
    suggesting = [name for name in names if name in SETTINGS and name not in NEVER_SUGGESTED]
    allowed = math.floor(budget_per_10k * num_healthy / 1e4 / len(suggesting))
    gap = math.ceil(EPISODE_STEPS / _spacing(series.steps))
    detectors = []
    for name in names:
        alarms = episodes(seen.alarms.get(name, ()))
        num_false = sum(step >= from_step for step in alarms)
        setting = SETTINGS.get(name)
        scores = seen.scores[name][first:] if name in suggesting else []
        detectors.append(
            Calibrated(
                name=name,
                asks=acting.get(name),
                alarms=alarms,
                num_false=num_false,
                per_10k=_per_10k(num_false, num_healthy),
                powers=powers.get(name, {}),
                threshold=getattr(thresholds, setting) if setting else None,
                suggested=_suggested(scores, allowed=allowed, gap=gap, least=least_threshold(setting) if setting else 0.0),
            )
        )
    acts = tuple(name for name in names if acting.get(name) in ACTS)
    union = episodes(sorted(step for name in acts for step in seen.alarms.get(name, ())))
    num_acted = sum(step >= from_step for step in union)
    return Calibration(len(series.steps), num_healthy, from_step, tuple(detectors), acts, _per_10k(num_acted, num_healthy))


def episodes(steps: Iterable[int]) -> tuple[int, ...]:
    """The first step of each stretch of alarms, ascending, that lie within 100 steps of the one before."""
    firsts: list[int] = []
    last = -math.inf
    for step in steps:
        if step - last > EPISODE_STEPS:
            firsts.append(step)
        last = step
    return tuple(firsts)


def _per_10k(num: int, num_rows: int) -> float:
    return 1e4 * num / num_rows if num_rows else 0.0


def _spacing(steps: Sequence[int]) -> float:
    return max(1.0, (steps[-1] - steps[0]) / max(1, len(steps) - 1))


def _places(num_rows: int, *, first: int, num: int, seed: int) -> list[int]:
    """Rows that faults begin at: none where too little comes before or behind them."""
    choices = range(max(first, 1), num_rows - MIN_ROWS_AFTER)
    return sorted(random.Random(seed).sample(choices, min(num, len(choices))))


def _pass(series: Series, *, rules: Mapping[str, Asks], thresholds: Thresholds, keep: frozenset[int]) -> _Pass:
    alarms: dict[str, list[int]] = {}
    states: dict[int, DetectorState] = {}
    scores: dict[str, list[float]] = {name: [] for name in SETTINGS if name in rules}
    sums = _Sums()
    state = DetectorState()
    for row in range(len(series.steps)):
        if row in keep:
            states[row] = state
        seen = series.observation(row)
        for name, score in sums.scores(state, seen).items():
            if name in scores:
                scores[name].append(score)
        state, findings = observe(state, seen, rules, thresholds=thresholds)
        for finding in findings:
            alarms.setdefault(finding.rule, []).append(seen.step)
    return _Pass(alarms, states, scores)


class _Sums:
    """What each threshold is compared with, row by row; cumulative sums without the ceiling that they have online."""

    def __init__(self) -> None:
        self._fast = self._slow = self._level = 0.0

    def scores(self, state: DetectorState, seen: Observation) -> dict[str, float]:
        if not math.isfinite(seen.loss) or math.isinf(seen.grad_norm):
            return dict.fromkeys(SETTINGS, 0.0)
        single, level, norm = read_loss(state.loss, seen.loss), read_level(state.loss, seen.loss), read_norm(state.norm, seen.grad_norm)
        z = single.z if single is not None else 0.0
        z_norm, times = (norm.z, norm.value / norm.median) if norm is not None else (0.0, 0.0)
        z_level = _cut(level.z) if level is not None else 0.0
        self._fast = max(0.0, self._fast + z_level - SLACK)
        self._slow = max(0.0, self._slow + z_level - SLACK_SLOW)
        self._level = max(0.0, self._level + _cut(z_norm) - SLACK_NORM)
        return {
            **{
                "outlier_loss": z / single.tail if single is not None else 0.0,
                "outlier_loss_mild": z,
                "outlier_loss_and_norm": min(z, z_norm),
            },
            **{"sustained_loss": self._fast, "sustained_loss_slow": self._slow},
            **{"grad_level": self._level, "grad_outlier": times, "grad_burst": times},
        }


def _cut(z: float) -> float:
    return max(-MOST_Z, min(MOST_Z, z))


def least_threshold(setting: str) -> float:
    """What is never gone below: the setting's own bound, and half of its default."""
    field = next(field for field in fields(MonitorSection) if field.name == setting)
    return max(float(field.metadata["low"] or 0.0), LEAST_SHARE * float(getattr(MonitorSection(), setting)))


def _suggested(scores: Sequence[float], *, allowed: int, gap: int, least: float) -> float | None:
    """The smallest threshold from `least` on that so many episodes exceed at most: by descending score, that of the first that would begin
    one more."""
    begun: list[int] = []
    for row in sorted(range(len(scores)), key=lambda row: -scores[row]):
        if any(abs(row - other) <= gap for other in begun):
            continue
        if len(begun) == allowed:
            return max(least, math.ceil(scores[row] * 100.0) / 100.0) if scores[row] > 0.0 else None
        begun.append(row)
    return None


def _powers(
    series: Series, seen: _Pass, *, names: Sequence[str], places: Sequence[int], rules: Mapping[str, Asks], thresholds: Thresholds
) -> dict[str, dict[str, Power]]:
    """By detector and fault."""
    powers: dict[str, dict[str, Power]] = {name: {} for name in names}
    for fault in FAULTS:
        if fault.on_norm and not series.has_norms:
            continue
        delays: dict[str, list[int]] = {name: [] for name in names}
        num_fair: dict[str, int] = dict.fromkeys(names, 0)
        for place in places:
            end = min(len(series.steps), place + fault.num_rows)
            spoke = _first_alarms(series, seen.states[place], fault, place=place, end=end, rules=rules, thresholds=thresholds)
            first, last = series.steps[place], series.steps[end - 1]
            for name in names:
                if any(first <= step <= last for step in seen.alarms.get(name, ())):
                    continue
                num_fair[name] += 1
                if name in spoke:
                    delays[name].append(spoke[name])
        for name in names:
            middle = statistics.median(delays[name]) if delays[name] else None
            powers[name][fault.name] = Power(num_fair[name], len(delays[name]), middle)
    return powers


def _first_alarms(
    series: Series, state: DetectorState, fault: Injected, *, place: int, end: int, rules: Mapping[str, Asks], thresholds: Thresholds
) -> dict[str, int]:
    """Rows after the onset at which each rule speaks first."""
    spoke: dict[str, int] = {}
    for row in range(place, end):
        state, findings = observe(state, fault.change(series.observation(row), row - place), rules, thresholds=thresholds)
        for finding in findings:
            spoke.setdefault(finding.rule, row - place)
    return spoke
