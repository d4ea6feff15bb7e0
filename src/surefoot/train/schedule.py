"""The learning rate as a function of the step, never of history: a skipped update does not shift it, a resume cannot."""

from __future__ import annotations

import math

from surefoot.core.sections import ScheduleSection


def learning_rate(step: int, schedule: ScheduleSection, *, num_steps: int, peak: float) -> float:
    """The rate of the update that makes training step number `step` (1-based). Beyond `num_steps` it stays at its last value.

    `peak` is that of the stage in which the step's first sample lies: a stage scales the curve, and does not begin it anew.
    WSD holds the peak until `decay_steps` before the end (arXiv 2405.18392); cosine goes half a period over what follows the warm-up.
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    floor = schedule.final_ratio
    return peak * (floor + (1.0 - floor) * _shape(min(step, num_steps), schedule, num_steps=num_steps))


def decay_length(schedule: ScheduleSection, *, num_steps: int) -> int:
    """Steps of the WSD decay: as configured, or a fifth of the run."""
    return schedule.decay_steps if schedule.decay_steps >= 0 else max(1, num_steps // 5)


def _shape(step: int, schedule: ScheduleSection, *, num_steps: int) -> float:
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "cosine":
        length = max(1, num_steps - schedule.warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * (step - schedule.warmup_steps) / length))
    length = decay_length(schedule, num_steps=num_steps)
    into_decay = step - (num_steps - length)
    if into_decay <= 0 or length == 0:
        return 1.0
    share = into_decay / length
    return 1.0 - share if schedule.decay_shape == "linear" else 1.0 - math.sqrt(share)
