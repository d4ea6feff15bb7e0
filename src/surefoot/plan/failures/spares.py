"""How many nodes to hold ready, from how often nodes leave and how long their repair takes. Pure.

Nodes leave as a Poisson stream, each repair takes its own time: the number in repair is then Poisson too, with mean rate x repair time,
whatever the repair times' distribution (C. Palm, 1943; the M/G/infinity queue).
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.plan.failures.interval import SECONDS_PER_DAY
from surefoot.plan.failures.rates import poisson_quantile

PROBABILITY = 0.99
REPAIR_S = SECONDS_PER_DAY
"""Of a node that was taken out: from the drain until it has passed its tests again. An assumption; a cluster's own figure replaces it."""


@dataclass(frozen=True, slots=True)
class Spares:
    """`num_nodes` are enough for `probability` of the time; `mean_in_repair` are away on average."""

    num_nodes: int
    probability: float
    mean_in_repair: float
    repair_s: float


def spares_for(leaving_per_day: float, *, repair_s: float = REPAIR_S, probability: float = PROBABILITY) -> Spares:
    """`leaving_per_day`: nodes of the whole job that are taken out a day."""
    mean = leaving_per_day * repair_s / SECONDS_PER_DAY
    return Spares(poisson_quantile(probability, mean=mean), probability, mean, repair_s)
