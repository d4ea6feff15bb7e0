"""The layout for every number of nodes: replicas go first, shards next, what makes a model one model never."""

from __future__ import annotations

import pytest

from surefoot.coordinate.world_sizes import WorldSize, legal_nodes, lines, num_nodes_of, ranks_per_node_of, world_sizes
from surefoot.core.errors import ConfigError
from surefoot.core.sections import ParallelSection


def sizes_of(parallel: ParallelSection, *, nodes: tuple[int, int], per_node: int, num_atoms: int = 64) -> dict[int, WorldSize]:
    return {size.num_nodes: size for size in world_sizes(parallel, nodes=nodes, ranks_per_node=per_node, num_atoms=num_atoms)}


def test_fewer_nodes_have_fewer_replicas() -> None:
    sizes = sizes_of(ParallelSection(dp_replicate=3, dp_shard=2), nodes=(1, 3), per_node=2)
    assert {count: (size.parallel.dp_replicate, size.parallel.dp_shard) for count, size in sizes.items() if size.parallel} == {
        1: (1, 2), 2: (2, 2), 3: (3, 2),
    }  # fmt: skip


def test_less_than_one_replica_is_cut_into_fewer_shards() -> None:
    size = sizes_of(ParallelSection(dp_shard=6), nodes=(1, 3), per_node=2)[1]
    assert size.parallel == ParallelSection(dp_replicate=1, dp_shard=2)


def test_nodes_short_of_a_whole_replica_are_of_no_use() -> None:
    sizes = sizes_of(ParallelSection(dp_replicate=2, dp_shard=4), nodes=(2, 4), per_node=2)
    assert sizes[3].parallel is None
    assert "no whole number of replicas" in sizes[3].reason
    assert legal_nodes(tuple(sizes.values())) == (2, 4)


def test_what_makes_a_model_one_model_stays() -> None:
    sizes = sizes_of(ParallelSection(dp_replicate=2, tp=2, pp=2), nodes=(1, 4), per_node=2)
    assert sizes[1].parallel is None
    assert sizes[3].parallel is None
    assert sizes[2].parallel == ParallelSection(dp_replicate=1, tp=2, pp=2)


def test_every_data_rank_has_a_micro_batch() -> None:
    sizes = sizes_of(ParallelSection(dp_replicate=4), nodes=(1, 4), per_node=1, num_atoms=3)
    assert legal_nodes(tuple(sizes.values())) == (1, 2, 3)


def test_memory_has_its_say() -> None:
    def why_not(layout: ParallelSection) -> str:
        return "too much" if layout.dp_shard < 4 else ""

    sizes = world_sizes(ParallelSection(dp_shard=4), nodes=(1, 2), ranks_per_node=2, num_atoms=64, why_not=why_not)
    assert legal_nodes(sizes) == (2,)
    assert lines(sizes) == ["1 nodes, 2 ranks: no layout: too much", "2 nodes, 4 ranks: dp_replicate 1, dp_shard 4"]
    with pytest.raises(ConfigError, match="too much"):
        legal_nodes(sizes[:1])


@pytest.mark.parametrize(("text", "wanted"), [("1", (1, 1)), ("2:4", (2, 4)), (" 3 ", (3, 3))])
def test_numbers_of_nodes(text: str, wanted: tuple[int, int]) -> None:
    assert num_nodes_of(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "4:2", "0:2", "two", "2:", "-1"])
def test_what_is_no_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no number of nodes"):
        num_nodes_of(text)


def test_ranks_are_dealt_out_evenly() -> None:
    assert ranks_per_node_of(ParallelSection(dp_replicate=6), most_nodes=3, asked=0) == 2
    with pytest.raises(ConfigError, match="3 nodes have 2 each"):
        ranks_per_node_of(ParallelSection(dp_replicate=7), most_nodes=3, asked=0)
