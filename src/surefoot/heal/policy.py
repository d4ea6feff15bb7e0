"""Verdict -> Action, pure and equal on every rank: a week of compute can hang on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.core.records import Action, Asks, Finding, Health, Pause, Proceed, Redo, RollBack, Signals, SkipUpdate, Verdict
from surefoot.core.sections import HealSection
from surefoot.heal.diagnosis import KNOWN_CAUSES

TIERS: Mapping[str, str] = {
    "sustained_loss": "loss",
    "sustained_loss_slow": "loss",
    "grad_level": "norm",
    "canary_rise": "canary",
    "diverged": "loss",
}
"""Rules whose findings are votes, and the tier that each speaks for. What else asks for a roll-back is sure of it, and needs no second."""

_NOT_FINITE = "the loss or the gradient is not finite"

BACK_OFF = "loss_scale_backoff"
"""The rule of a skip by which fp16 finds its scale: no sign of illness above the smallest scale."""


@dataclass(frozen=True, slots=True)
class Vote:
    tier: str
    rule: str
    step: int
    onset_step: int


@dataclass(frozen=True, slots=True)
class HealState:
    """What the policy remembers. It is saved with the checkpoint, so a resumed run decides as the uninterrupted one would.

    `marks` are the newest steps that were skipped or ill, and `in_a_row` how many of them were the last ones.
    """

    in_a_row: int = 0
    marks: tuple[int, ...] = ()
    votes: tuple[Vote, ...] = ()

    def as_json(self) -> dict[str, Any]:
        votes = [[vote.tier, vote.rule, vote.step, vote.onset_step] for vote in self.votes]
        return {"in_a_row": self.in_a_row, "marks": list(self.marks), "votes": votes}


def heal_state_from_json(value: Mapping[str, Any]) -> HealState:
    """From a checkpoint; older ones knew the row of skips alone."""
    votes = tuple(Vote(str(tier), str(rule), int(step), int(onset)) for tier, rule, step, onset in value.get("votes", ()))
    return HealState(int(value.get("in_a_row", value.get("skips_in_a_row", 0))), tuple(map(int, value.get("marks", ()))), votes)


@dataclass(frozen=True, slots=True)
class Situation:
    """What else the decision hangs on, equal on all ranks. `num_rollbacks` is folded from the ledger over `heal.budget_steps`.

    `can_redo`: the loop can compute the step again, and has not yet. `in_episode`: a roll-back is being looked into, so what would be a
    reason for one is for the episode to judge. `can_skip`: the data port leaves samples out when asked.
    """

    num_rollbacks: int = 0
    can_redo: bool = False
    in_episode: bool = False
    can_skip: bool = True
    at_minimum_scale: bool = False


def decide(
    signals: Signals,
    verdict: Verdict,
    state: HealState,
    *,
    section: HealSection,
    situation: Situation,
    max_grad_norm: float,
    gradient_divisor: float,
) -> tuple[Action, HealState]:
    """What all ranks do with this step.

    The gradients hold the sum over live tokens divided by `gradient_divisor`, so the scale of Proceed turns them into the clipped mean.
    An empty batch is a no-op and not a sign of illness: it neither counts towards the breaker nor ends a row of bad ones.
    """
    step = signals.step + 1
    is_no_illness = verdict.rule == "no_live_tokens" or (verdict.rule == BACK_OFF and not situation.at_minimum_scale)
    # No binding, dry run or open episode lets through what would end the weights.
    must_skip = verdict.rule == BACK_OFF or not _is_finite(signals)
    bad = must_skip or (verdict.health is Health.BAD and not section.dry_run)
    if bad and not is_no_illness and situation.can_redo and verdict.rule not in KNOWN_CAUSES:
        return Redo(f"{verdict.rule or 'nonfinite'}: {verdict.reason or _NOT_FINITE}", rule="recheck"), state
    state = with_votes(state, verdict.findings, step=step, section=section)
    pausing = next((found for found in verdict.findings if found.asks is Asks.PAUSE), None)
    if pausing is not None and not section.dry_run:
        return Pause(pausing.rule, pausing.reason, pausing.onset_step), _marked(state, step, section)
    agreed = agreed_on(state, verdict.findings, section)
    if agreed and not (situation.in_episode or section.rollback == "off" or section.dry_run):
        return _roll_back(agreed, section, situation), replace(state, votes=())
    if is_no_illness:
        return SkipUpdate(verdict.rule, verdict.reason), state
    if bad:
        state = _marked(state, step, section)
        return _skip_or_break(verdict, state, step, section), state
    proceed = Proceed(clip_scale=clip_scale(signals, max_grad_norm=max_grad_norm, gradient_divisor=gradient_divisor))
    return proceed, replace(state, in_a_row=0)


def _skip_or_break(verdict: Verdict, state: HealState, step: int, section: HealSection) -> SkipUpdate | Pause:
    """Skip, or the breaker: skipping on and on hides what is wrong, and trains nothing."""
    within = [mark for mark in state.marks if mark > step - section.breaker_steps]
    if state.in_a_row >= section.breaker_in_a_row:
        how = f"{state.in_a_row} steps in a row were ill"
    elif len(within) >= section.breaker_num:
        how = f"{len(within)} of the last {section.breaker_steps} steps were ill"
    else:
        return SkipUpdate(verdict.rule or "nonfinite", verdict.reason or _NOT_FINITE)
    return Pause("breaker", f"{how}, the last because {verdict.reason or _NOT_FINITE}", state.marks[0])


def _is_finite(signals: Signals) -> bool:
    return math.isfinite(signals.loss) and math.isfinite(signals.grad_norm) and signals.num_nonfinite == 0


def _roll_back(agreed: Sequence[Finding | Vote], section: HealSection, situation: Situation) -> RollBack | Pause:
    onset = min(found.onset_step for found in agreed)
    rules = ", ".join(sorted({found.rule for found in agreed}))
    reason = f"{rules} since step {onset}"
    if situation.num_rollbacks >= section.max_rollbacks:
        what = f"{reason}; {situation.num_rollbacks} roll-backs within {section.budget_steps} steps did not help"
        return Pause("rollback_budget", what, onset)
    skips_at_once = section.rollback == "skip_at_once" or section.preset == "classic"
    if skips_at_once and not situation.can_skip:
        return Pause("no_way_to_skip", f"{reason}; the data port of this loop leaves nothing out, as heal.rollback asks", onset)
    if skips_at_once:
        return RollBack(max(0, onset - 1 - section.back_steps), "skip", rules, reason, onset, section.skip_steps)
    return RollBack(max(0, onset - 1), "diagnose", rules, reason, onset)


def with_votes(state: HealState, findings: Sequence[Finding], *, step: int, section: HealSection) -> HealState:
    """With what this step's findings vote for, and without what is too old to agree with it."""
    new = [Vote(TIERS[one.rule], one.rule, step, one.onset_step) for one in findings if one.asks is Asks.ROLL_BACK and one.rule in TIERS]
    kept = [vote for vote in state.votes if vote.step > step - section.agree_steps and vote.tier not in {vote.tier for vote in new}]
    return replace(state, votes=(*kept, *new))


def agreed_on(state: HealState, findings: Sequence[Finding], section: HealSection) -> tuple[Finding | Vote, ...]:
    """What a roll-back stands on; empty without one. Something must speak in this very step: votes alone grow old."""
    sure = tuple(found for found in findings if found.asks is Asks.ROLL_BACK and found.rule not in TIERS)
    if sure:
        return sure
    speaks_now = any(found.asks is Asks.ROLL_BACK for found in findings)
    return state.votes if speaks_now and len({vote.tier for vote in state.votes}) >= section.num_agreeing else ()


def _marked(state: HealState, step: int, section: HealSection) -> HealState:
    marks = (*(mark for mark in state.marks if mark > step - section.breaker_steps and mark != step), step)
    return replace(state, in_a_row=state.in_a_row + 1, marks=marks[-section.breaker_num - section.breaker_in_a_row :])


def clip_scale(signals: Signals, *, max_grad_norm: float, gradient_divisor: float) -> float:
    """The one factor for all gradients: from the (divided) sum to the mean over live tokens, clipped to `max_grad_norm` (0 is off).

    The 1e-6 is torch.nn.utils.clip_grad_norm_'s, so that clipping agrees with it.
    """
    clip = min(1.0, max_grad_norm / (signals.grad_norm + 1e-6)) if max_grad_norm > 0 else 1.0
    return clip * gradient_divisor / signals.num_live_tokens
