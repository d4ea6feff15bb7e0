"""The bubble of a pipeline: closed forms, legal numbers of micro-batches, and the fewest that keep it small. Pure.

p stages, v chunks on each, m micro-batches of a step. The idle time of equal stages is (p - 1) / v forwards and backwards on every rank
(arXiv 2104.04473). Over the ideal time that is (p - 1) / (v m), over the whole step (p - 1) / (v m + p - 1): two figures that are often
taken for each other, so both are told. `pipeline_timeline` plays a schedule out and finds the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.core.errors import PlanInfeasible
from surefoot.plan.records import PipelineSchedule

BACKWARD_OF_FORWARD = 2.0
"""A backward is two products for each of the forward: one for what entered, one for the weights."""


@dataclass(frozen=True, slots=True)
class Bubble:
    """`idle_of_ideal`: idle time over the time of a full pipeline. `idle_of_total`: over the whole step."""

    idle_of_ideal: float
    idle_of_total: float


def closed_form(pp: int, *, num_micro_batches: int, chunks: int = 1, schedule: PipelineSchedule = "1f1b") -> Bubble:
    """Of equal stages. Zero-bubble fills up with weight gradients what would be idle: (p - 1) (F + B - W) of H1 (arXiv 2401.10241)."""
    idle = (pp - 1) / chunks * idle_forwards(schedule)
    busy = num_micro_batches * (1.0 + BACKWARD_OF_FORWARD)
    return Bubble(idle / busy, idle / (busy + idle))


def idle_forwards(schedule: PipelineSchedule) -> float:
    """How many forwards of a piece each further stage waits for. A backward's two halves are taken to be a forward each."""
    return 1.0 if schedule == "zero_bubble" else 1.0 + BACKWARD_OF_FORWARD


def fewest_micro_batches(
    pp: int, *, max_bubble: float, chunks: int = 1, of_stages: bool = False, schedule: PipelineSchedule = "1f1b"
) -> int:
    """The smallest legal m whose idle share of the whole step is at most `max_bubble`: m >= (p - 1) (1 - f) / (f v).

    `of_stages`: only multiples of p, as Megatron-LM asks of interleaved schedules. Raises PlanInfeasible for a bound that no m reaches.
    """
    if pp == 1:
        return 1
    if not 0 < max_bubble < 1:
        raise PlanInfeasible(
            f"no pipeline idles at most {max_bubble:g} of the time", where="max_bubble", hint="a share in (0, 1)", got=max_bubble
        )
    share = idle_forwards(schedule) / (1.0 + BACKWARD_OF_FORWARD)
    at_least = (pp - 1) * share * (1.0 - max_bubble) / (max_bubble * chunks)
    number = max(math.ceil(at_least - 1e-9), 1)
    return -(-number // pp) * pp if of_stages else num_scheduled(number, pp=pp, schedule=schedule)


def num_scheduled(num_micro_batches: int, *, pp: int, schedule: PipelineSchedule) -> int:
    """With how many micro-batches surefoot runs that many: at least one a stage, and in equal rounds where stages have several pieces.

    The rest are phantoms, which cost as much as others do.
    """
    number = max(num_micro_batches, pp)
    if schedule != "1f1b":
        while number % (number // pp):
            number += 1
    return number
