"""Advisory sums over every other signal: activations, attention logits, moments, update ratios. They tell, and never heal alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.catalog import RATIO, RATIO_BURST, advisory_rule
from surefoot.monitor.detectors.cusum import AT_ZERO, Cusum, Limits
from surefoot.monitor.detectors.robust import SIGMA_OF_MAD, Window, clipped, mad, median

NUM_KEPT, NUM_LEAST = 64, 16
"""Values of each signal. There may be more than a thousand signals, and twice as many values were 3.6 MB of JSON at every save; with half
as many a third of the steps up by 3 sigma is missed, since the level follows before the sum is high."""

LIMITS = Limits(slack=1.0, height=12.0, repeat=1000)
"""What goes on is said again once in a thousand looks: advice is no vote, and signals of a healthy run grow for long."""

FLOOR_SHARE, FLOOR = 0.02, 1e-4
"""Sigma at least: a share of the level, and for shares and counts that are mostly zero an absolute one."""

CLIP_SIGMAS = 8.0
BURST = 10.0
"""Times the trailing median: the update of one group, against its weights. It is told once, until the ratio fell below half of that."""

MOST_TOLD = 16
"""Signals that one finding names; the rest are counted."""

_EMPTY = Window(NUM_KEPT)


@dataclass(frozen=True, slots=True)
class Advice:
    values: Window = _EMPTY
    cusum: Cusum = AT_ZERO
    is_burst: bool = False


@dataclass(frozen=True, slots=True)
class _Reading:
    """A signal that stands above its level, `speaks` if it does so anew. `excess` in sigmas."""

    name: str
    value: float
    level: float
    excess: float
    onset_step: int
    speaks: bool


def watch_signals(
    states: Mapping[str, Advice],
    *,
    step: int,
    probes: Mapping[str, float],
    update_ratios: Mapping[str, float],
    rules: Mapping[str, Asks],
    frozen: bool,
    is_warming: bool = False,
) -> tuple[Mapping[str, Advice], list[Finding]]:
    """The states of the signals that are there this time, and of those that are not. One finding per rule: what is up, the worst first.

    `is_warming`: the learning rate grows, and all signals with it; levels are learnt and nothing is held against them.
    """
    if not probes and not update_ratios:
        return states, []
    moved, up = dict(states), list[_Reading]()
    findings: list[Finding] = []
    for name, value in (*probes.items(), *((f"{RATIO}:{group}", ratio) for group, ratio in update_ratios.items())):
        if not math.isfinite(value):
            continue
        state = moved.get(name, Advice())
        if is_warming or len(state.values) < NUM_LEAST:
            moved[name] = state if frozen else Advice(state.values.push(value))
            continue
        moved[name], reading, burst = _watch(state, name=name, value=value, step=step, frozen=frozen)
        if reading is not None:
            up.append(reading)
        if burst and RATIO_BURST in rules:
            findings.append(_burst(name, value, median(state.values.ordered), step=step, asks=rules[RATIO_BURST]))
    return moved, [*_joined(up, rules=rules), *findings]


def without_ratios(states: Mapping[str, Advice]) -> Mapping[str, Advice]:
    """Where a stage begins, with other rates and weights that others move, what updates were is no measure."""
    return {name: state for name, state in states.items() if not name.startswith(f"{RATIO}:")}


def _watch(state: Advice, *, name: str, value: float, step: int, frozen: bool) -> tuple[Advice, _Reading | None, bool]:
    """The state after one more value, the reading where the sum stands above its height, and whether a burst begins."""
    level = median(state.values.ordered)
    sigma = max(SIGMA_OF_MAD * mad(state.values.ordered, centre=level), FLOOR_SHARE * abs(level), min(FLOOR, 0.1 * abs(level)) or FLOOR)
    cusum, speaks = state.cusum.add((value - level) / sigma, step=step, limits=LIMITS)
    reading = _Reading(name, value, level, (value - level) / sigma, cusum.onset_step, speaks) if cusum.told else None
    limit = BURST * level if name.startswith(f"{RATIO}:") and level > 0.0 else math.inf
    is_burst = value > (limit / 2.0 if state.is_burst else limit)
    values = state.values if frozen else state.values.push(clipped(value, centre=level, reach=CLIP_SIGMAS * sigma))
    return Advice(values, cusum, is_burst), reading, is_burst and not state.is_burst


def _burst(name: str, value: float, level: float, *, step: int, asks: Asks) -> Finding:
    told = f"the update of {name.partition(':')[2]} is {value / level:.3g} times its median against the weights"
    # Ratios are those of the update before.
    return Finding(RATIO_BURST, asks, told, step - 1, {"signal": name, "value": value, "level": level})


def _joined(up: Sequence[_Reading], *, rules: Mapping[str, Asks]) -> list[Finding]:
    """By the rule that binds a signal: its own, that of its kind, or the one for all. Nothing where none of a rule's signals rose anew."""
    by_rule: dict[str, list[_Reading]] = {}
    for reading in sorted(up, key=lambda reading: -reading.excess):
        if (rule := advisory_rule(reading.name, rules)) is not None:
            by_rule.setdefault(rule, []).append(reading)
    return [_told(rule, rules[rule], found) for rule, found in by_rule.items() if any(reading.speaks for reading in found)]


def _told(rule: str, asks: Asks, found: Sequence[_Reading]) -> Finding:
    worst = found[0]
    told = f"{worst.name} has stayed above its level of {worst.level:.4g} since step {worst.onset_step}: now {worst.value:.4g}"
    if len(found) > 1:
        told += f"; {len(found) - 1} other signals are up"
    signals = [{"signal": one.name, "value": one.value, "level": one.level, "onset_step": one.onset_step} for one in found[:MOST_TOLD]]
    evidence = {"signals": signals, "num_signals": len(found)}
    return Finding(rule, asks, told, min(reading.onset_step for reading in found if reading.speaks), evidence)
