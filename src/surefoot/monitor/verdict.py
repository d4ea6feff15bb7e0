"""Signals -> Verdict, pure. The detectors that need history come later; these need none and are always on."""

from __future__ import annotations

import math

from surefoot.core.records import Health, Signals, Verdict

HEALTHY = Verdict(health=Health.HEALTHY)


def judge(signals: Signals) -> Verdict:
    """What this step is worth before its update. A non-finite value is bad; a batch without live tokens is healthy but empty."""
    if signals.num_live_tokens == 0:
        return Verdict(Health.SUSPECT, rule="no_live_tokens", reason="every token of the batch is masked, so there is no gradient")
    if signals.overflowed:
        return Verdict(
            Health.BAD,
            rule="loss_scale_backoff",
            reason=f"the gradient of {signals.num_nonfinite} tensors is not finite at a loss scale of {signals.loss_scale:g}",
            evidence={"num_nonfinite": signals.num_nonfinite, "loss": signals.loss, "loss_scale": signals.loss_scale},
        )
    if signals.num_nonfinite or not math.isfinite(signals.grad_norm):
        return Verdict(
            Health.BAD,
            rule="nonfinite_gradient",
            reason=f"the gradient of {signals.num_nonfinite} tensors is not finite",
            evidence={"num_nonfinite": signals.num_nonfinite, "loss": signals.loss, "ranks": _ranks_with_nonfinite_loss(signals)},
        )
    if not math.isfinite(signals.loss):
        return Verdict(
            Health.BAD, rule="nonfinite_loss", reason="the loss is not finite", evidence={"ranks": _ranks_with_nonfinite_loss(signals)}
        )
    return HEALTHY


def _ranks_with_nonfinite_loss(signals: Signals) -> list[int]:
    return [part.rank for part in signals.ranks if not math.isfinite(part.loss_sum)]
