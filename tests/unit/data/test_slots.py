from __future__ import annotations

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ParallelSection
from surefoot.data.atoms import deal
from surefoot.data.slots import data_rank_of, place_of_slot, ranks_of
from surefoot.parallel.mesh import place_of

LAYOUTS = [
    ParallelSection(),
    ParallelSection(dp_shard=3),
    ParallelSection(dp_replicate=2, dp_shard=2, tp=2),
    ParallelSection(dp_replicate=2, dp_shard=3, pp=2, cp=2, tp=2),
]


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize("rotation", [0, 1])
def test_a_slot_is_where_it_is_dealt_to(parallel: ParallelSection, rotation: int) -> None:
    num_ranks, num_samples, micro_batch_size = parallel.dp_replicate * parallel.dp_shard, 23, 3
    for rank in range(num_ranks):
        atoms = deal(num_samples, micro_batch_size=micro_batch_size, num_ranks=num_ranks, rank=rank, rotation=rotation)
        for micro_step, atom in enumerate(atoms):
            for row in range(atom.num_rows):
                slot = atom.first_slot + row
                place = place_of_slot(slot, micro_batch_size=micro_batch_size, parallel=parallel, rotation=rotation)
                assert (place.data_rank, place.micro_step, place.row) == (rank, micro_step, micro_step * micro_batch_size + row)


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_ranks_of_a_data_rank_are_those_of_the_mesh(parallel: ParallelSection) -> None:
    for rank in range(parallel.num_ranks):
        data_rank = place_of(parallel, rank=rank, world_size=parallel.num_ranks).data_rank
        assert data_rank_of(rank, parallel=parallel) == data_rank
        assert rank in ranks_of(data_rank, parallel=parallel)
    together = [rank for data_rank in range(parallel.dp_replicate * parallel.dp_shard) for rank in ranks_of(data_rank, parallel=parallel)]
    assert sorted(together) == list(range(parallel.num_ranks))


@pytest.mark.parametrize("rank", [-1, 3, 99])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="ranks 0 to 2"):
        data_rank_of(rank, parallel=ParallelSection(dp_shard=3))
