"""The canary: the loss on a frozen held-out set, 12 to 70 times quieter than that of training. It sees slow harm, and whose it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.core.records import Asks, Finding
from surefoot.core.sections import CanarySection
from surefoot.monitor.detectors.catalog import RULES

NUM_CLASSIC, CLASSIC_SIGMAS = 5, 2.0
"""canary_2sigma_500, as it is told: the five evaluations of 500 steps, the newest left out, since with it nothing ever fires."""

DEFAULT_RULES: Mapping[str, Asks] = {name: asks for name in ("canary_rise", "canary_apart") if (asks := RULES[name].tiers) is not None}


@dataclass(frozen=True, slots=True)
class CanaryState:
    """`best` so far and `good_step`, the newest evaluation that was not above it by the margin; nan and -1 before the first.

    `num_above`: evaluations in a row since then that were. `recent`: the newest losses, for the classic rule.
    """

    best: float = math.nan
    good_step: int = -1
    num_above: int = 0
    is_up: bool = False
    recent: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        best = None if math.isnan(self.best) else self.best
        return {"best": best, "good_step": self.good_step, "num_above": self.num_above, "is_up": self.is_up, "recent": list(self.recent)}


def canary_from_json(value: Mapping[str, Any]) -> CanaryState:
    """What `to_json` gave; an empty object is a fresh state."""
    if not value:
        return CanaryState()
    best = math.nan if value["best"] is None else float(value["best"])
    return CanaryState(best, int(value["good_step"]), int(value["num_above"]), bool(value["is_up"]), tuple(value["recent"]))


def hear(
    state: CanaryState,
    *,
    step: int,
    loss: float,
    section: CanarySection,
    rebased: bool = False,
    loss_is_high: bool = False,
    rules: Mapping[str, Asks] = DEFAULT_RULES,
) -> tuple[CanaryState, tuple[Finding, ...]]:
    """The state after the evaluation of `step`, and what it says. It says it again at each evaluation that stays up.

    `rebased`: learning rate, batch or mixture changed on purpose since the last one, so the best begins anew. `loss_is_high`: the training
    loss stands above its level too; where it does not, a canary that is up points to corruption, and replicas should be audited at once.
    A loss that is not finite is above any best, and enters nothing.
    """
    if rebased:
        state = CanaryState()
    if not math.isfinite(loss):
        moved = replace(state, num_above=state.num_above + 1, is_up=True)
        return moved, _rises(moved, step=step, loss=loss, section=section, loss_is_high=loss_is_high, rules=rules)
    classic = _two_sigma(state, step=step, loss=loss, rules=rules)
    recent = (*state.recent[-(NUM_CLASSIC - 1) :], loss)
    if not loss > state.best + section.margin_nats:  # nan before the first: then it is the best
        best = loss if math.isnan(state.best) else min(state.best, loss)
        return CanaryState(best, step, recent=recent), classic
    num_above = state.num_above + 1
    moved = CanaryState(state.best, state.good_step, num_above, num_above >= section.num_in_a_row, recent)
    if not moved.is_up:
        return moved, classic
    return moved, (*_rises(moved, step=step, loss=loss, section=section, loss_is_high=loss_is_high, rules=rules), *classic)


def whose(canary: CanaryState, loss_is_high: bool) -> Literal["data", "model", "corruption", "none"]:
    """Where to look first: a spike that the canary does not share is the data's, one that it shares the model's; a canary alone that is up
    is silent corruption, an error of the optimizer, or drift."""
    if canary.is_up:
        return "model" if loss_is_high else "corruption"
    return "data" if loss_is_high else "none"


def _rises(
    state: CanaryState, *, step: int, loss: float, section: CanarySection, loss_is_high: bool, rules: Mapping[str, Asks]
) -> tuple[Finding, ...]:
    onset_step = state.good_step + 1 if state.good_step >= 0 else step
    above = f"{loss - state.best:.4g} nats above its best of {state.best:.5g}" if math.isfinite(loss) else "not finite"
    told = f"the canary is {above}, {state.num_above} evaluations in a row"
    evidence: dict[str, object] = {
        "value": loss if math.isfinite(loss) else None,
        "best": None if math.isnan(state.best) else state.best,
        "margin": section.margin_nats,
        "in_a_row": state.num_above,
    }
    findings = []
    if "canary_rise" in rules:
        findings.append(Finding("canary_rise", rules["canary_rise"], told, onset_step, evidence))
    if "canary_apart" in rules and not loss_is_high:
        told = f"{told}, while the training loss looks normal: corruption, an error of the optimizer, or drift"
        findings.append(Finding("canary_apart", rules["canary_apart"], told, onset_step, {**evidence, "audit": True}))
    return tuple(findings)


def _two_sigma(state: CanaryState, *, step: int, loss: float, rules: Mapping[str, Asks]) -> tuple[Finding, ...]:
    if "canary_2sigma_500" not in rules or len(state.recent) < NUM_CLASSIC:
        return ()
    mean, sigma = statistics.fmean(state.recent), statistics.stdev(state.recent)
    if abs(loss - mean) <= CLASSIC_SIGMAS * sigma:
        return ()
    told = f"the canary {loss:.5g} is over {CLASSIC_SIGMAS:g} sigma from {mean:.5g}, the mean of {NUM_CLASSIC}"
    evidence = {"value": loss, "mean": mean, "sigma": sigma}
    return (Finding("canary_2sigma_500", rules["canary_2sigma_500"], told, step, evidence),)
