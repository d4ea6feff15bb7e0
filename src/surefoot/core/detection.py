"""How late this run's slowest detector may speak: what a checkpoint must outlast. Pure.

A fault of L steps ago has spoiled every checkpoint since. Where the oldest that is kept is younger, there is no way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from surefoot.core.sections import RunConfig

SUSTAINED_STEPS: Final = 576
"""A rise of the loss is held against the losses of up to this many steps before. What has lasted for longer is what they foretell."""

CANARY_LATENCY_STEPS: Final = 425
"""From the onset to the first evaluation above the margin: a drift of 0.05 nats in 2,100 steps was found 625 steps after it, by two
evaluations 100 apart, in 86% of injections into public runs."""


def detection_steps(config: RunConfig) -> Mapping[str, int]:
    """By kind of detector that is on, the steps from the onset of what it can find to its finding."""
    audit, canary = config.monitor.audit_interval_steps, config.canary
    found = {"sustained loss": SUSTAINED_STEPS}
    if canary.interval_steps:
        found["canary"] = canary.num_in_a_row * canary.interval_steps + CANARY_LATENCY_STEPS
    if audit and config.parallel.num_ranks > 1:
        found["audit"] = audit
    return found


def slowest_detection_steps(config: RunConfig) -> int:
    """From the onset of a fault to the roll-back: the slowest detector, a second one that must agree, and the wait for what a spike becomes.

    No longer than the run.
    """
    heal = config.heal
    agreeing = heal.agree_steps if heal.num_agreeing > 1 else 0
    return min(config.train.num_steps, max(detection_steps(config).values()) + agreeing + heal.decide_steps)
