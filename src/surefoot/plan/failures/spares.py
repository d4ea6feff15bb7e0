"""How many nodes to hold ready, from how often nodes leave and how long their repair takes. Pure.

Nodes leave as a Poisson stream, each repair takes its own time: the number in repair is then Poisson too, with mean rate x repair time,
whatever the repair times' distribution (C. Palm, 1943; the M/G/infinity queue).
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.plan.failures.interval import SECONDS_PER_DAY
from surefoot.plan.failures.rates import llama_3_shares, poisson_quantile

PROBABILITY = 0.99
REPAIR_S = SECONDS_PER_DAY
"""Of a node that was taken out: from the drain until it has passed its tests again. An assumption; a cluster's own figure replaces it."""


@dataclass(frozen=True, slots=True)
class Spares:
    """`num_nodes` beside a job are enough for `probability` of the time. Without any, `mean_in_repair` of the job's own are away on
    average: those do not fail meanwhile. Of all failures, at `per_node_day`, `node_share` take a node."""

    num_nodes: int
    probability: float
    mean_in_repair: float
    repair_s: float
    per_node_day: float
    node_share: float


def spares_for(
    per_node_day: float,
    *,
    num_nodes: float,
    node_share: float | None = None,
    repair_s: float = REPAIR_S,
    probability: float = PROBABILITY,
) -> Spares:
    """Of a job of `num_nodes`. A fault of a process takes no node, nor does a switch or a cable, whose nodes are well; `node_share` is the
    rest, by default as in Llama 3's table of causes."""
    share = llama_3_shares()["node"] if node_share is None else node_share
    each = per_node_day * share * repair_s / SECONDS_PER_DAY
    return Spares(
        num_nodes=poisson_quantile(probability, mean=each * num_nodes),
        probability=probability,
        mean_in_repair=num_nodes * each / (1.0 + each),
        repair_s=repair_s,
        per_node_day=per_node_day,
        node_share=share,
    )
