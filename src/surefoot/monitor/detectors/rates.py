"""Rules of the learning rate: what the loop says it will update with, and what the optimizer had."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.core.records import Asks, Finding

MOST_GROWTH = 2.0
"""No schedule doubles its rate within a step but a warm-up's first: a factor below is some schedule's, one above is a mistake."""

SAME_SLOPE = 1.05
NOT_APPLIED = 1e-4
"""Relative. A rate kept in float32 is off by 6e-8."""


@dataclass(frozen=True, slots=True)
class RateState:
    """The last rate that was no jump, the step that it was told at, and how much it grew per step."""

    step: int = 0
    lr: float = math.nan
    growth: float = 0.0


def watch_rate(
    state: RateState, *, step: int, lr: float, applied_ratio: float, rebased: bool, rules: Mapping[str, Asks]
) -> tuple[RateState, list[Finding]]:
    """A jump is not learnt, so each step of it is found. Warm-up is linear in steps: from zero, or as it grew before."""
    findings = []
    if math.isfinite(applied_ratio) and abs(applied_ratio - 1.0) > NOT_APPLIED and "lr_not_applied" in rules:
        told = f"the update of step {step - 1} was made with {applied_ratio:.6g} times the learning rate that the loop had said"
        evidence = {"applied_ratio": applied_ratio, "cause": "schedule"}
        findings.append(Finding("lr_not_applied", rules["lr_not_applied"], told, step - 1, evidence))
    if not math.isfinite(lr) or lr < 0.0:
        return state, findings
    gap = max(1, step - state.step)
    if not rebased and state.lr > 0.0 and "lr_jump" in rules and _jumps(state, lr=lr, gap=gap):
        told = f"the learning rate is {lr:.4g}, {lr / state.lr:.3g} times the {state.lr:.4g} of step {state.step}, and no warm-up grows so"
        evidence = {"lr": lr, "before": state.lr, "times": lr / state.lr, "cause": "schedule"}
        return state, [*findings, Finding("lr_jump", rules["lr_jump"], told, step, evidence)]
    growth = (lr - state.lr) / gap if math.isfinite(state.lr) else 0.0
    return RateState(step, lr, max(0.0, growth)), findings


def _jumps(state: RateState, *, lr: float, gap: int) -> bool:
    from_zero = state.lr / state.step if state.step > 0 else 0.0
    return lr > MOST_GROWTH * state.lr and lr - state.lr > SAME_SLOPE * gap * max(from_zero, state.growth)
