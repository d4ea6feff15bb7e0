"""Advisory sums over every other signal: activations, attention logits, moments, update ratios. They tell, and never heal alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.catalog import ADVISORY
from surefoot.monitor.detectors.cusum import AT_ZERO, Cusum, Limits
from surefoot.monitor.detectors.robust import SIGMA_OF_MAD, Window, clipped, mad, median

NUM_KEPT, NUM_LEAST = 128, 16
LIMITS = Limits(slack=1.0, height=12.0)
FLOOR_SHARE, FLOOR = 0.02, 1e-4
"""Sigma at least: a share of the level, and for shares and counts that are mostly zero an absolute one."""

CLIP_SIGMAS = 8.0
BURST = 10.0
"""Times the trailing median: the update of one group, against its weights."""


_EMPTY = Window(NUM_KEPT)


@dataclass(frozen=True, slots=True)
class Advice:
    values: Window = _EMPTY
    cusum: Cusum = AT_ZERO


def watch_signals(
    states: Mapping[str, Advice],
    *,
    step: int,
    probes: Mapping[str, float],
    update_ratios: Mapping[str, float],
    rules: Mapping[str, Asks],
    frozen: bool,
) -> tuple[Mapping[str, Advice], list[Finding]]:
    """The states of the signals that are there this time, and of those that are not."""
    if not probes and not update_ratios:
        return states, []
    moved, findings = dict(states), []
    for name, value in (*probes.items(), *((f"update_ratio:{group}", ratio) for group, ratio in update_ratios.items())):
        if not math.isfinite(value):
            continue
        moved[name], found = _watch(moved.get(name, Advice()), name=name, value=value, step=step, rules=rules, frozen=frozen)
        findings += found
    return moved, findings


def _watch(state: Advice, *, name: str, value: float, step: int, rules: Mapping[str, Asks], frozen: bool) -> tuple[Advice, list[Finding]]:
    if len(state.values) < NUM_LEAST:
        return state if frozen else Advice(state.values.push(value), state.cusum), []
    level = median(state.values.ordered)
    sigma = max(SIGMA_OF_MAD * mad(state.values.ordered, centre=level), FLOOR_SHARE * abs(level), min(FLOOR, 0.1 * abs(level)) or FLOOR)
    cusum, speaks = state.cusum.add((value - level) / sigma, step=step, limits=LIMITS)
    evidence = {"signal": name, "value": value, "level": level, "sigma": sigma}
    findings = []
    asks = rules.get(f"{ADVISORY}:{name}", rules.get(ADVISORY))
    if speaks and asks is not None:
        told = f"{name} has stayed above its level of {level:.4g} since step {cusum.onset_step}: now {value:.4g}"
        findings.append(Finding(f"{ADVISORY}:{name}", asks, told, cusum.onset_step, evidence))
    is_ratio = name.startswith("update_ratio:")
    if is_ratio and value > BURST * level > 0.0 and "update_ratio_burst" in rules:
        told = f"the update of {name.partition(':')[2]} is {value / level:.3g} times its median against the weights"
        # Ratios are those of the update before.
        findings.append(Finding("update_ratio_burst", rules["update_ratio_burst"], told, step - 1, evidence))
    values = state.values if frozen else state.values.push(clipped(value, centre=level, reach=CLIP_SIGMAS * sigma))
    return Advice(values, cusum), findings
