"""Findings -> Verdict, pure. What a finding gets of what it asks for is for the policy to say."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.core.records import Asks, Finding, Health, Signals, Verdict

HEALTHY = Verdict(health=Health.HEALTHY)

_GRAVEST_FIRST = (Asks.PAUSE, Asks.ROLL_BACK, Asks.SKIP, Asks.ALERT, Asks.RECORD)


def verdict_of(signals: Signals, findings: Sequence[Finding]) -> Verdict:
    """What this step is worth before its update: bad where a finding asks that it be not made, suspect where one asks for more than a line.

    A batch without live tokens has no gradient: there is nothing to update with, and it is no sign of illness. `rule`, `reason` and
    `evidence` are those of the finding that speaks against the update, where there is one.
    """
    ordered = tuple(sorted(findings, key=lambda found: _GRAVEST_FIRST.index(found.asks)))
    others = tuple(found for found in ordered if found.asks is not Asks.SKIP)  # what an audit found stays found
    if signals.num_live_tokens == 0:
        reason = "every token of the batch is masked, so there is no gradient"
        return Verdict(Health.SUSPECT, "no_live_tokens", reason, findings=others)
    if signals.overflowed:
        reason = f"the gradient overflowed under the loss scale {signals.loss_scale:g}"
        return Verdict(Health.BAD, "loss_scale_backoff", reason, {"loss_scale": signals.loss_scale}, others)
    if not ordered:
        return HEALTHY
    against = next((found for found in ordered if found.asks is Asks.SKIP), None)
    first = against or ordered[0]
    without = Health.HEALTHY if first.asks is Asks.RECORD else Health.SUSPECT
    health = Health.BAD if against is not None else without
    return Verdict(health, first.rule, first.reason, first.evidence, ordered)
