"""How many of the devices to use: a number that no layout divides well is worth less than a smaller one and a spare node. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.plan.hardware import Accelerator
from surefoot.plan.records import Workload
from surefoot.plan.search import Ranked, rank

MAX_SPARE_NODES = 2


def whole_node_counts(num_devices: int, devices_per_node: int, *, max_spare_nodes: int = MAX_SPARE_NODES) -> tuple[int, ...]:
    """All of them, then whole nodes, one fewer, and so on."""
    nodes = num_devices // devices_per_node
    counts = [num_devices, *(devices_per_node * (nodes - spare) for spare in range(max_spare_nodes + 1) if nodes > spare)]
    return tuple(dict.fromkeys(counts))


def rank_counts(workload: Workload, hardware: Accelerator, counts: Sequence[int], **how: Any) -> dict[int, Ranked]:
    """`search.rank` of each number of devices, in the order given."""
    return {number: rank(workload, hardware, number, **how) for number in counts}


def fastest_count(ranked: dict[int, Ranked]) -> int | None:
    """The number whose best layout trains most tokens per second; None where nothing can be run with any."""
    can = {number: found.layouts[0].tokens_per_s for number, found in ranked.items() if found.layouts}
    return max(can, key=can.__getitem__, default=None)
