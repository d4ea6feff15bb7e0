from __future__ import annotations

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ParallelSection
from surefoot.parallel.mesh import across_hosts, place_of, warn_of_placement


def test_neighbours_in_rank_are_neighbours_on_the_innermost_axis() -> None:
    parallel = ParallelSection(dp_replicate=2, dp_shard=3, cp=2, tp=2, pp=2)
    places = [place_of(parallel, rank=rank, world_size=48) for rank in range(48)]
    assert [place.coordinates["tp"] for place in places[:4]] == [0, 1, 0, 1]
    assert [place.coordinates["cp"] for place in places[:4]] == [0, 0, 1, 1]
    assert len({tuple(place.coordinates.items()) for place in places}) == 48
    assert {place.data_rank for place in places} == set(range(6))
    assert [place.data_rank for place in places[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_another_number_of_ranks_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        place_of(ParallelSection(dp_shard=4), rank=0, world_size=3)
    assert (caught.value.values["got"], caught.value.values["wanted"]) == (3, 4)


@pytest.mark.parametrize(
    ("tp", "cp", "ranks_per_host", "spanning"),
    [
        (2, 1, 2, ()),
        (2, 2, 4, ()),
        (2, 2, 8, ()),
        (1, 1, 3, ()),
        (4, 1, 2, ("tp",)),
        (2, 2, 2, ("cp",)),
        (2, 2, 3, ("tp", "cp")),
        (2, 1, 3, ("tp",)),
    ],
)
def test_axes_inside_a_layer_that_span_hosts_are_named(
    tp: int, cp: int, ranks_per_host: int, spanning: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    place = place_of(ParallelSection(tp=tp, cp=cp, dp_shard=6), rank=0, world_size=6 * tp * cp)
    assert across_hosts(place, ranks_per_host=ranks_per_host) == spanning
    warn_of_placement(place, ranks_per_host=ranks_per_host)
    assert [f"parallel.{axis} = " in record.message for axis, record in zip(spanning, caplog.records, strict=True)] == [True] * len(
        spanning
    )
