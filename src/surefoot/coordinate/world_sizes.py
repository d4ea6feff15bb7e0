"""The layout for every number of nodes that a job may have, known before it starts. Pure.

`[parallel]` is the layout of the largest number of nodes. Fewer of them change how the data is dealt out, and nothing else: whole replicas
go first, then a replica is cut into fewer shards. What a model needs to stay one model (tensor, context, pipeline) is never changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ParallelSection


@dataclass(frozen=True, slots=True)
class WorldSize:
    """`parallel` is None where so many nodes cannot train this model, and `reason` says why; else how it differs from what was asked."""

    num_nodes: int
    num_ranks: int
    parallel: ParallelSection | None
    reason: str


def num_nodes_of(nodes: str) -> tuple[int, int]:
    """(least, most) out of "3" or "2:3". Raises ConfigError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nodes.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"`{nodes}` is no number of nodes", where="[launch] nodes", hint='"2" for two, "2:4" for two to four')
    return least, most


def ranks_per_node_of(parallel: ParallelSection, *, most_nodes: int, asked: int) -> int:
    """How many ranks each node has; `asked` 0 deals those of [parallel] out evenly. Raises ConfigError when they do not fit."""
    per_node = asked or parallel.num_ranks // most_nodes
    if per_node * most_nodes != parallel.num_ranks:
        raise ConfigError(
            f"[parallel] has {parallel.num_ranks} ranks, {most_nodes} nodes have {per_node} each",
            where="[launch] ranks_per_node",
            hint="[parallel] is the layout of the largest number of nodes",
            got=parallel.num_ranks,
            wanted=per_node * most_nodes,
        )
    return per_node


def world_sizes(
    parallel: ParallelSection,
    *,
    nodes: tuple[int, int],
    ranks_per_node: int,
    num_atoms: int,
    why_not: Callable[[ParallelSection], str] = lambda _: "",
) -> tuple[WorldSize, ...]:
    """One for each number of nodes from the least to the most. `num_atoms` are the micro-batches of a global batch: a data rank without
    one would do nothing. `why_not` judges a layout by its memory: empty when it fits."""
    counts = range(nodes[0], nodes[1] + 1)
    return tuple(_size_of(parallel, count, count * ranks_per_node, num_atoms=num_atoms, why_not=why_not) for count in counts)


def legal_nodes(sizes: Sequence[WorldSize]) -> tuple[int, ...]:
    """Raises ConfigError, with the reason for each, when no number of nodes can train."""
    legal = tuple(size.num_nodes for size in sizes if size.parallel is not None)
    if not legal:
        reasons = "; ".join(f"{size.num_nodes}: {size.reason}" for size in sizes)
        raise ConfigError(f"no number of nodes has a layout: {reasons}", where="[launch] nodes", hint="change [parallel] or the batch")
    return legal


def lines(sizes: Sequence[WorldSize]) -> list[str]:
    """For the start of a run."""
    return [f"{size.num_nodes} nodes, {size.num_ranks} ranks: {size.reason}" for size in sizes]


def _size_of(
    full: ParallelSection, num_nodes: int, num_ranks: int, *, num_atoms: int, why_not: Callable[[ParallelSection], str]
) -> WorldSize:
    def illegal(reason: str) -> WorldSize:
        return WorldSize(num_nodes, num_ranks, None, f"no layout: {reason}")

    of_a_model = full.tp * full.cp * full.pp
    if num_ranks % of_a_model:
        return illegal(f"tp x cp x pp is {of_a_model} ranks, which does not divide {num_ranks}")
    num_data_ranks = num_ranks // of_a_model
    if num_data_ranks % full.dp_shard == 0:
        layout = replace(full, dp_replicate=num_data_ranks // full.dp_shard)
    elif num_data_ranks < full.dp_shard:
        layout = replace(full, dp_replicate=1, dp_shard=num_data_ranks)
    else:
        return illegal(f"{num_data_ranks} data ranks are no whole number of replicas of {full.dp_shard} shards")
    if num_data_ranks > num_atoms:
        return illegal(f"{num_data_ranks} data ranks share {num_atoms} micro-batches: some would have none")
    if reason := why_not(layout):
        return illegal(reason)
    return WorldSize(num_nodes, num_ranks, layout, f"dp_replicate {layout.dp_replicate}, dp_shard {layout.dp_shard}")
