"""How far back checkpoints must reach: behind whatever the slowest detector convicts."""

from __future__ import annotations

from dataclasses import replace

from surefoot.core.detection import CANARY_LATENCY_STEPS, SUSTAINED_STEPS, detection_steps, slowest_detection_steps
from surefoot.core.sections import CanarySection, HealSection, MonitorSection, ParallelSection, RunConfig, TrainSection

LONG = RunConfig(
    train=TrainSection(num_steps=1_000_000),
    parallel=ParallelSection(dp_shard=8),
    heal=HealSection(num_agreeing=2, agree_steps=30, decide_steps=40),
)


def test_the_slowest_decides_with_the_second_opinion_and_the_wait() -> None:
    slow_canary = replace(LONG, canary=CanarySection(interval_steps=1000, num_in_a_row=3))
    assert slowest_detection_steps(slow_canary) == 3000 + 10 * CANARY_LATENCY_STEPS + 30 + 40
    close_canary = replace(LONG, canary=CanarySection(interval_steps=10, num_in_a_row=3))
    assert detection_steps(close_canary)["canary"] == 30 + CANARY_LATENCY_STEPS
    rare_audit = replace(LONG, monitor=MonitorSection(audit_interval_steps=9000))
    assert slowest_detection_steps(rare_audit) == 9000 + 30 + 40


def test_what_is_off_or_alone_waits_for_nothing() -> None:
    off = replace(LONG, canary=CanarySection(interval_steps=0), monitor=MonitorSection(audit_interval_steps=0))
    assert detection_steps(off) == {"sustained loss": SUSTAINED_STEPS}
    alone = replace(LONG, parallel=ParallelSection(), heal=replace(LONG.heal, num_agreeing=1))
    assert "audit" not in detection_steps(alone)
    assert slowest_detection_steps(alone) == max(detection_steps(alone).values()) + 40


def test_no_longer_than_the_run() -> None:
    assert slowest_detection_steps(replace(LONG, train=TrainSection(num_steps=7))) == 7
