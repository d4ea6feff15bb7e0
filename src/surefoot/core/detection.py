"""How late this run's slowest detector may speak: what a checkpoint must outlast. Pure.

A fault of L steps ago has spoiled every checkpoint since. Where the oldest that is kept is younger, there is no way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from surefoot.core.sections import RunConfig

SUSTAINED_STEPS: Final = 576
"""A rise of the loss is held against the losses of up to this many steps before. What has lasted for longer is what they foretell."""

CANARY_LATENCY_STEPS: Final = 600
"""From the onset to the first evaluation above the margin, by evaluations 100 apart: a drift of 0.05 nats in 2,100 steps, put into made
learning runs whose canary has a noise of 0.002 nats, was found within 800 steps in 86% of cases, the second evaluation included."""

CANARY_LATENCY_INTERVAL: Final = 100
"""Evaluations farther apart are fewer, and their noise is told from fewer: the latency grows with the interval. Closer ones find a drift of
so many nats a step hardly sooner."""


def detection_steps(config: RunConfig) -> Mapping[str, int]:
    """By kind of detector that is on, the steps from the onset of what it can find to its finding."""
    audit, canary = config.monitor.audit_interval_steps, config.canary
    found = {"sustained loss": SUSTAINED_STEPS}
    if canary.interval_steps:
        latency_steps = CANARY_LATENCY_STEPS * max(1.0, canary.interval_steps / CANARY_LATENCY_INTERVAL)
        found["canary"] = canary.num_in_a_row * canary.interval_steps + round(latency_steps)
    if audit and config.parallel.num_ranks > 1:
        found["audit"] = audit
    return found


def slowest_detection_steps(config: RunConfig) -> int:
    """From the onset of a fault to the roll-back: the slowest detector, a second one that must agree, the wait for what a spike becomes.

    No longer than the run.
    """
    heal = config.heal
    agreeing = heal.agree_steps if heal.num_agreeing > 1 else 0
    return min(config.train.num_steps, max(detection_steps(config).values()) + agreeing + heal.decide_steps)
