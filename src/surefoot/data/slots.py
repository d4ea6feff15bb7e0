"""Which rank computes which slot of a step, and the other way round: the dealing of `atoms`, looked up instead of played out.

A data rank is a group of global ranks that get the same samples: those that differ in pp, cp or tp alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ParallelSection


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where one slot of a step is computed. `row` counts the samples of its data rank over all micro-steps; `rank` is the first of `ranks`.

    The row within the micro-step is `row - micro_step * micro_batch_size`.
    """

    slot: int
    data_rank: int
    micro_step: int
    row: int
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.ranks[0]


def place_of_slot(slot: int, *, micro_batch_size: int, parallel: ParallelSection, rotation: int = 0) -> SlotPlace:
    """The inverse of `atoms.deal`."""
    num_data_ranks = parallel.dp_replicate * parallel.dp_shard
    atom, row = divmod(slot, micro_batch_size)
    micro_step, turn = divmod(atom, num_data_ranks)
    data_rank = (turn + rotation) % num_data_ranks
    return SlotPlace(
        slot=slot,
        data_rank=data_rank,
        micro_step=micro_step,
        row=micro_step * micro_batch_size + row,
        ranks=ranks_of(data_rank, parallel=parallel),
    )


def ranks_of(data_rank: int, *, parallel: ParallelSection) -> tuple[int, ...]:
    """The global ranks of a data rank, ascending. From outermost to innermost the axes are pp, dp_replicate, dp_shard, cp, tp."""
    inner = parallel.cp * parallel.tp
    num_data_ranks = parallel.dp_replicate * parallel.dp_shard
    return tuple((stage * num_data_ranks + data_rank) * inner + position for stage in range(parallel.pp) for position in range(inner))


def data_rank_of(rank: int, *, parallel: ParallelSection) -> int:
    """Raises ConfigError when there is no such global rank."""
    if not 0 <= rank < parallel.num_ranks:
        hint = f"[parallel] has ranks 0 to {parallel.num_ranks - 1}"
        raise ConfigError(f"there is no rank {rank}", where="--rank", hint=hint, got=rank, limit=parallel.num_ranks)
    return rank // (parallel.cp * parallel.tp) % (parallel.dp_replicate * parallel.dp_shard)
