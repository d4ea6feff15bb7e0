"""The canary: the loss on a frozen held-out set, 12 to 70 times quieter than that of training. It sees slow harm, and whose it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.core.records import Asks, Finding
from surefoot.core.sections import CanarySection
from surefoot.monitor.detectors.catalog import RULES
from surefoot.monitor.detectors.robust import SIGMA_OF_MAD

NUM_KEPT, NUM_LEAST = 24, 8
"""Evaluations that the noise is told from: so many, since it changes with the schedule; from fewer it cannot be told."""

YOUNG_RISES, YOUNG_MORE = 2.0, 1
"""With fewer, the margin is twice the largest rise so far, since a young loss falls and what rises is noise, and one evaluation more must
be above."""

SIGMAS, SIGMAS_PER_LOG, SMALL_SAMPLE = 0.5, 0.7, 6.0
"""The lowest of n noisy levels lies deeper the larger n is: 4 sigmas of margin are due after 150 evaluations, 6.5 after 5,000. Of a sigma
that is told from n differences, 6 / n more."""

NUM_LEARNT = 16
"""Evaluations in a row above the margin, after which their noise counts too: what is quiet by chance mutes or alarms nobody for ever."""

SIGMA_OF_SECOND_DIFFERENCE = SIGMA_OF_MAD / math.sqrt(6.0)
NUM_CLASSIC, CLASSIC_SIGMAS = 5, 2.0
"""canary_2sigma_500, as it is told: the five evaluations of 500 steps, the newest left out, since with it nothing ever fires."""

DEFAULT_RULES: Mapping[str, Asks] = {name: asks for name in ("canary_rise", "canary_apart") if (asks := RULES[name].tiers) is not None}


@dataclass(frozen=True, slots=True)
class CanaryState:
    """`best`, the lowest level so far, and `good_step`, the newest evaluation not above it by the margin; nan and -1 before the first.

    A level is what two evaluations in a row are at or below: the lowest single one is luck. `num_above`: evaluations in a row since
    `good_step` that were above. `recent`: the newest losses, of `count` since the best began.
    """

    best: float = math.nan
    good_step: int = -1
    num_above: int = 0
    is_up: bool = False
    recent: tuple[float, ...] = ()
    count: int = 0

    def to_json(self) -> dict[str, Any]:
        best = None if math.isnan(self.best) else self.best
        above = {"good_step": self.good_step, "num_above": self.num_above, "is_up": self.is_up}
        return {"best": best, **above, "recent": list(self.recent), "count": self.count}


def canary_from_json(value: Mapping[str, Any]) -> CanaryState:
    """What `to_json` gave; an empty object is a fresh state."""
    if not value:
        return CanaryState()
    best = math.nan if value["best"] is None else float(value["best"])
    recent = tuple(map(float, value["recent"]))
    count = int(value.get("count", len(recent)))
    return CanaryState(best, int(value["good_step"]), int(value["num_above"]), bool(value["is_up"]), recent, count)


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
    margin = margin_of(state, section)
    if not math.isfinite(loss):
        moved = replace(state, num_above=state.num_above + 1, is_up=True)
        return moved, _rises(moved, step=step, loss=loss, margin=margin, loss_is_high=loss_is_high, rules=rules)
    classic = _two_sigma(state, step=step, loss=loss, rules=rules)
    recent, count = (*state.recent[-(NUM_KEPT - 1) :], loss), state.count + 1
    if not loss > state.best + margin:  # nan before the first: then it is the best
        level = max(recent[-2:])
        best = level if math.isnan(state.best) else min(state.best, level)
        return CanaryState(best, step, recent=recent, count=count), classic
    num_above = state.num_above + 1
    is_up = num_above >= section.num_in_a_row + (YOUNG_MORE if state.count - state.num_above < NUM_LEAST else 0)
    moved = CanaryState(state.best, state.good_step, num_above, is_up, recent, count)
    if not moved.is_up:
        return moved, classic
    return moved, (*_rises(moved, step=step, loss=loss, margin=margin, loss_is_high=loss_is_high, rules=rules), *classic)


def margin_of(state: CanaryState, section: CanarySection) -> float:
    """Nats above the best that noise does not reach: `canary.margin_nats` at least, more where the set is small and its loss noisy.

    Noise is told from second differences, which a trend does not enter, of neighbours, and of every other one for noise that lingers.
    The evaluations that are above now do not count, unless they have been for long.
    """
    known = state.recent[: max(0, len(state.recent) - state.num_above)]
    if state.num_above >= NUM_LEARNT or len(known) < 3:
        known = state.recent
    if len(known) < NUM_LEAST:
        rises = (loss - min(known[:place]) for place, loss in enumerate(known) if place)
        return max(section.margin_nats, YOUNG_RISES * max(rises, default=0.0))
    sigmas = SIGMAS + SIGMAS_PER_LOG * math.log(max(1, state.count))
    return max(section.margin_nats, sigmas * max(_noise(known, lag=1), _noise(known, lag=2)))


def _noise(losses: Sequence[float], *, lag: int) -> float:
    bends = [abs(old - 2.0 * middle + new) for old, middle, new in zip(losses, losses[lag:], losses[2 * lag :], strict=False)]
    return SIGMA_OF_SECOND_DIFFERENCE * statistics.median(bends) * (1.0 + SMALL_SAMPLE / len(bends))


def whose(canary: CanaryState, loss_is_high: bool) -> Literal["data", "model", "corruption", "none"]:
    """Where to look first: a spike that the canary does not share is the data's, one that it shares the model's; a canary alone that is up
    is silent corruption, an error of the optimizer, or drift."""
    if canary.is_up:
        return "model" if loss_is_high else "corruption"
    return "data" if loss_is_high else "none"


def _rises(
    state: CanaryState, *, step: int, loss: float, margin: float, loss_is_high: bool, rules: Mapping[str, Asks]
) -> tuple[Finding, ...]:
    onset_step = state.good_step + 1 if state.good_step >= 0 else step
    above = f"{loss - state.best:.4g} nats above its best of {state.best:.5g}" if math.isfinite(loss) else "not finite"
    told = f"the canary is {above}, {state.num_above} evaluations in a row"
    evidence: dict[str, object] = {
        "value": loss if math.isfinite(loss) else None,
        "best": None if math.isnan(state.best) else state.best,
        "margin": margin,
        "in_a_row": state.num_above,
        "whose": whose(state, loss_is_high),
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
    before = state.recent[-NUM_CLASSIC:]
    mean, sigma = statistics.fmean(before), statistics.stdev(before)
    if abs(loss - mean) <= CLASSIC_SIGMAS * sigma:
        return ()
    told = f"the canary {loss:.5g} is over {CLASSIC_SIGMAS:g} sigma from {mean:.5g}, the mean of {NUM_CLASSIC}"
    evidence = {"value": loss, "mean": mean, "sigma": sigma}
    return (Finding("canary_2sigma_500", rules["canary_2sigma_500"], told, step, evidence),)
