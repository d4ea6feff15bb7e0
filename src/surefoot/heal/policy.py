"""Verdict -> Action, pure and equal on every rank: a week of compute can hang on it."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.core.records import Action, Halt, Health, Proceed, Signals, SkipUpdate, Verdict


@dataclass(frozen=True, slots=True)
class HealState:
    """What the policy remembers. It is saved with the checkpoint, so a resumed run decides as the uninterrupted one would."""

    skips_in_a_row: int = 0


def decide(
    signals: Signals, verdict: Verdict, state: HealState, *, max_grad_norm: float, gradient_divisor: float, max_skips_in_a_row: int
) -> tuple[Action, HealState]:
    """What all ranks do with this step.

    The gradients hold the sum over live tokens divided by `gradient_divisor`, so the scale of Proceed turns them into the clipped mean.
    An empty batch is a no-op and not a sign of illness: it neither counts towards the halt nor ends a row of bad ones.
    """
    if verdict.rule == "no_live_tokens":
        return SkipUpdate(rule=verdict.rule, reason=verdict.reason), state
    if verdict.health is Health.BAD:
        skips = state.skips_in_a_row + 1
        if skips > max_skips_in_a_row:
            return Halt(
                rule="skips_in_a_row", reason=f"{skips} updates in a row had to be skipped, the last because {verdict.reason}"
            ), state
        return SkipUpdate(rule=verdict.rule, reason=verdict.reason), HealState(skips_in_a_row=skips)
    return Proceed(clip_scale=clip_scale(signals, max_grad_norm=max_grad_norm, gradient_divisor=gradient_divisor)), HealState()


def clip_scale(signals: Signals, *, max_grad_norm: float, gradient_divisor: float) -> float:
    """The one factor for all gradients: from the (divided) sum to the mean over live tokens, clipped to `max_grad_norm` (0 is off).

    The 1e-6 is torch.nn.utils.clip_grad_norm_'s, so that clipping agrees with it.
    """
    clip = min(1.0, max_grad_norm / (signals.grad_norm + 1e-6)) if max_grad_norm > 0 else 1.0
    return clip * gradient_divisor / signals.num_live_tokens
