"""Where the ranks of an axis sit, and how long their collectives take: rings and trees over the links of a node and of the fabric. Pure.

Ranks are placed as surefoot's mesh places them: tp innermost, then cp, dp_shard, dp_replicate, and pp outermost (docs/layouts.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from surefoot.plan.hardware import Accelerator
from surefoot.plan.records import Layout

NODE_HOP_S = 3.4e-6
FABRIC_HOP_S = 14.0e-6
START_S = 8.4e-6
"""A step of a ring over NVLink, one over a network, and the start of a ring, protocol "simple": hwLat and baseLat of NCCL's
src/graph/tuning.cc. Its tree takes the same network step once per level."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What of the data sheet's links arrives. `bandwidth` multiplies it, `latency` a step between nodes. `rails`: k devices of a node that
    are in one group reach k ** rails times the bandwidth of one, 1 where each has a network card of its own and all of them are filled."""

    bandwidth: float
    latency: float
    rails: float


class Group(NamedTuple):
    """`size` ranks, `in_node` of them on each node."""

    size: int
    in_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.in_node)

    @property
    def leaves_node(self) -> bool:
        return self.num_nodes > 1


def group_at(size: int, *, stride: int, devices_per_node: int) -> Group:
    """Of ranks that are `stride` apart."""
    return Group(size, min(size, max(1, devices_per_node // stride)))


def groups_of(layout: Layout, devices_per_node: int) -> dict[str, Group]:
    """By axis. `shard` are the ranks that share one copy of the weights: dp_shard and cp together."""
    inner, shards = layout.tp, layout.cp * layout.dp_shard
    sizes = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, inner),
        "ep": (layout.ep, inner * layout.cp),
        "shard": (shards, inner),
        "dp_replicate": (layout.dp_replicate, inner * shards),
        "pp": (layout.pp, inner * shards * layout.dp_replicate),
    }
    return {axis: group_at(size, stride=stride, devices_per_node=devices_per_node) for axis, (size, stride) in sizes.items()}


def ring_bandwidth(group: Group, hardware: Accelerator, rates: LinkRates) -> float:
    """bytes/s of one device. Where a ring leaves the node, its devices there share the way out."""
    if not group.leaves_node:
        return hardware.node_link * rates.bandwidth
    out = hardware.fabric_link * math.pow(group.in_node, rates.rails)
    return min(hardware.node_link, out) * rates.bandwidth


def gather_s(num_bytes: float, group: Group, hardware: Accelerator, rates: LinkRates, *, num_messages: float = 1.0) -> float:
    """An all-gather of `num_bytes` in all, or a reduce-scatter, in `num_messages` parts: a device sends (n - 1) / n of it round a ring."""
    if group.size == 1:
        return 0.0
    moved = num_bytes * (group.size - 1) / group.size
    return moved / ring_bandwidth(group, hardware, rates) + num_messages * _ring_s(group, rates)


def _ring_s(group: Group, rates: LinkRates) -> float:
    """Until the first byte has gone all the way round."""
    crossings = group.num_nodes - 1 if group.leaves_node else 0
    return START_S + (group.size - 1 - crossings) * NODE_HOP_S + crossings * FABRIC_HOP_S * rates.latency


def reduce_s(num_bytes: float, group: Group, hardware: Accelerator, rates: LinkRates, *, num_messages: float = 1.0) -> float:
    """An all-reduce: twice the bytes of a gather, over a ring or a tree, whichever is sooner."""
    if group.size == 1:
        return 0.0
    moved_s = 2.0 * num_bytes * (group.size - 1) / group.size / ring_bandwidth(group, hardware, rates)
    levels = math.ceil(math.log2(group.num_nodes)) if group.leaves_node else 0
    tree_s = 2.0 * ((group.in_node - 1) * NODE_HOP_S + levels * FABRIC_HOP_S * rates.latency)
    return moved_s + num_messages * min(2.0 * _ring_s(group, rates), tree_s)


def all_to_all_s(num_bytes: float, group: Group, hardware: Accelerator, rates: LinkRates) -> float:
    """Each device sends `num_bytes` in equal parts to all of the group: those for other nodes through its own network card."""
    if group.size == 1:
        return 0.0
    part = num_bytes / group.size
    outside_s = part * (group.size - group.in_node) / hardware.fabric_link
    inside_s = part * (group.in_node - 1) / hardware.node_link
    return max(outside_s, inside_s) / rates.bandwidth + START_S + _hop_s(group, rates)


def pass_s(num_bytes: float, group: Group, hardware: Accelerator, rates: LinkRates) -> float:
    """To a neighbour in `group`; between nodes, for that is what the slowest stage waits for."""
    link = hardware.fabric_link if group.leaves_node else hardware.node_link
    return num_bytes / (link * rates.bandwidth) + _hop_s(group, rates)


def _hop_s(group: Group, rates: LinkRates) -> float:
    return FABRIC_HOP_S * rates.latency if group.leaves_node else NODE_HOP_S
