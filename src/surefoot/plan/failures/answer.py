"""The parts `checkpoint` and `reliability` of a plan, as JSON has them. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from surefoot.plan.failures.reliability import Reliability


def answer_of(found: Reliability) -> dict[str, dict[str, Any]]:
    """Seconds, bytes, US dollars, shares of 1."""
    interval = found.interval
    return {
        "checkpoint": {
            "interval_s": interval.seconds,
            "interval_steps": interval.steps,
            "stall_s": interval.stall_s,
            "write_s": interval.write_s,
            "formulas": {"young_s": interval.young_s, "daly_s": interval.daly_s, "availability_s": interval.availability_s},
            "retention": asdict(found.retention),
            "bytes": asdict(found.bytes),
            "stage_s": found.times.stage_s,
            "flush_s": found.times.flush_s,
            "shared_s": found.times.shared_s,
        },
        "reliability": {
            "failures": asdict(found.failures),
            "goodput": asdict(found.goodput),
            "cost": asdict(found.cost),
            "spares": asdict(found.spares),
        },
    }
