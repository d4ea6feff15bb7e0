"""Which checkpoints a run must keep, from how late its slowest detector speaks: the settings of `[checkpoint]`, and what they cost. Pure.

A fault that is convicted L steps late has spoiled every checkpoint of the last L steps. The way back is to one before it, so one must
still be there. Older ones are kept at distances that double (`cover_steps`), which costs a logarithm of L instead of L / interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MARGIN = 1.5
"""On the detection latency: figures of detectors are medians, and a rollback wants the step before the fault, not that of the alarm."""

KEEP_LAST = 3
"""The newest, one should it be damaged, and one more: what `checkpoint.keep_last` says by default."""

NUM_MILESTONES = 10
"""Of a run, kept for good: to branch from and to study."""


@dataclass(frozen=True, slots=True)
class Retention:
    """`num_rolling` and `num_milestones` checkpoints stand on disk late in the run; the latter are the multiples of `milestone_steps`.

    A fault that is convicted `latency_steps` late is rolled back by at most `worst_rollback_steps`.
    """

    keep_last: int
    cover_steps: int
    milestone_steps: int
    latency_steps: int
    num_rolling: int
    num_milestones: int
    worst_rollback_steps: int


def retention_for(
    detection_s: float,
    *,
    step_s: float,
    interval_steps: int,
    total_steps: int,
    keep_last: int = KEEP_LAST,
    num_milestones: int = NUM_MILESTONES,
) -> Retention:
    """Settings that let the run go back behind a fault convicted `detection_s` after it happened."""
    latency_steps = math.ceil(detection_s / step_s)
    reach = (keep_last - 1) * interval_steps
    cover = min(math.ceil(latency_steps * MARGIN), total_steps)
    cover_steps = 0 if cover + interval_steps <= reach else _round_up(cover, interval_steps)
    milestone_steps = _round_up(max(1, total_steps // num_milestones), interval_steps) if num_milestones else 0
    num_rolling = rolling_checkpoints(interval_steps=interval_steps, keep_last=keep_last, cover_steps=cover_steps)
    return Retention(
        keep_last=keep_last,
        cover_steps=cover_steps,
        milestone_steps=milestone_steps,
        latency_steps=latency_steps,
        num_rolling=min(num_rolling, total_steps // interval_steps + 1),
        num_milestones=total_steps // milestone_steps if milestone_steps else 0,
        worst_rollback_steps=min(total_steps, max(2 * latency_steps, latency_steps + interval_steps)),
    )


def rolling_checkpoints(*, interval_steps: int, keep_last: int, cover_steps: int) -> int:
    """How many there are at most: the newest, and two for each doubling of the distance from there to the cover. One would do at any one
    time, but distances grow by what was kept before."""
    doublings = (cover_steps // (keep_last * interval_steps)).bit_length()
    return keep_last + (2 * doublings or min(1, cover_steps))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
