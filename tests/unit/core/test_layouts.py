from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest

from surefoot.core.layouts import (
    LAYOUT_AXES,
    doubts,
    feed_forward_width,
    layout_facts,
    nearest_legal,
    pipeline_chunks,
    refusals,
    topology,
)
from surefoot.core.sections import DataSection, ModelSection, NumericsSection, ParallelSection, RunConfig, TrainSection


def config_of(*, model: ModelSection | None = None, seq_len: int = 256, **parallel: Any) -> RunConfig:
    return RunConfig(model=model or ModelSection(), data=DataSection(seq_len=seq_len), parallel=ParallelSection(**parallel))


MODELS = {
    "laptop": ModelSection(),
    "odd": ModelSection(num_layers=3, d_model=60, num_heads=5, d_ff=77, vocab_size=91),
    "grouped": ModelSection(num_layers=12, num_heads=12, num_kv_heads=4),
    "factory": ModelSection(factory="my.models:build"),
}
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"pp_chunks": 3},
    {"pp_schedule": "interleaved"},
    {"pp_schedule": "zero_bubble", "pp_chunks": 1},
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_product_up_to_8_ranks_is_legal_or_refused_with_a_legal_one_of_as_many_ranks(model: str, schedule: dict[str, Any]) -> None:
    for sizes in [sizes for sizes in product(range(1, 9), repeat=len(LAYOUT_AXES)) if prod(sizes) <= 8]:
        axes = dict(zip(LAYOUT_AXES, sizes, strict=True))
        config = config_of(model=MODELS[model], seq_len=252, **axes, **schedule)
        found = refusals(config)
        nearest = nearest_legal(config)
        assert nearest is not None
        assert nearest.num_ranks == config.parallel.num_ranks
        assert refusals(replace(config, parallel=nearest)) == []
        assert (nearest == config.parallel) == (not found)
        for setting, what, hint in found:
            assert setting.startswith("parallel.")
            assert what
            assert "nearest legal: " in hint


REFUSED: list[tuple[dict[str, Any], ModelSection, str, str]] = [
    ({"tp": 4}, ModelSection(), "tp = 4 does not divide model.num_heads = 6", "dp_shard = 2, tp = 2"),
    ({"tp": 3}, ModelSection(), "tp = 3 may not divide the vocabulary", "dp_shard = 3"),
    (
        {"tp": 2, "dp_replicate": 2},
        ModelSection(num_kv_heads=3),
        "tp = 2 does not divide model.num_kv_heads = 3",
        "dp_shard = 2, dp_replicate = 2",
    ),
    ({"tp": 2}, ModelSection(d_ff=63), "tp = 2 does not divide model.d_ff = 63", "dp_shard = 2"),
    ({"tp": 2}, ModelSection(vocab_size=999), "tp = 2 does not divide model.vocab_size = 999", "dp_shard = 2"),
    ({"cp": 3}, ModelSection(), "cp = 3 does not divide data.seq_len = 256", "dp_shard = 3"),
    ({"pp": 8}, ModelSection(), "pp = 8 needs 8 layers, model.num_layers = 4", "dp_shard = 2, pp = 4"),
    (
        {"pp": 4, "pp_schedule": "interleaved"},
        ModelSection(),
        "pp = 4 with 2 chunks each needs 8 layers, model.num_layers = 4",
        'pp = 4, pp_schedule = "1f1b"',
    ),
    ({"pp": 2, "pp_chunks": 2}, ModelSection(), "1f1b has one piece per rank, not 2", "pp = 2, pp_chunks = 0"),
    ({"pp": 2, "pp_schedule": "zero_bubble", "pp_chunks": 1}, ModelSection(), "needs at least 2 pieces", "pp = 2, pp_chunks = 0"),
    (
        {"pp": 2, "pp_schedule": "zero_bubble", "recompute": "selective"},
        ModelSection(),
        "zero_bubble, whose many backwards through a block",
        'pp = 2, pp_schedule = "1f1b"',
    ),
    (
        {"pp": 2, "pp_schedule": "zero_bubble", "recompute": "full"},
        ModelSection(),
        "zero_bubble, whose many backwards through a block",
        'pp = 2, pp_schedule = "1f1b"',
    ),
    (
        {"pp": 2, "pp_schedule": "zero_bubble", "pp_chunks": 2, "recompute": "full"},
        ModelSection(),
        "zero_bubble, whose many backwards through a block",
        'pp = 2, pp_schedule = "interleaved"',
    ),
    ({"tp": 2, "pp": 2}, ModelSection(factory="a:b"), "how to cut a model of model.factory", "dp_shard = 4"),
]


@pytest.mark.parametrize(("parallel", "model", "what", "nearest"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_cannot_be_cut_is_refused_by_name_with_the_nearest_that_can(
    parallel: dict[str, Any], model: ModelSection, what: str, nearest: str
) -> None:
    found = refusals(config_of(model=model, **parallel))
    assert any(what in said for _, said, _ in found)
    assert all(hint.endswith(f"nearest legal: {nearest}") for *_, hint in found)


@pytest.mark.parametrize(
    ("parallel", "tied", "nearest"),
    [
        ({"tp": 2, "cp": 2}, True, ParallelSection(dp_shard=4)),
        ({"tp": 4, "pp": 2}, True, ParallelSection(dp_shard=8)),
        ({"tp": 2, "pp": 2}, False, ParallelSection(dp_shard=2, pp=2)),
        ({"pp": 2, "pp_schedule": "zero_bubble"}, False, ParallelSection(pp=2)),
    ],
)
def test_with_exact_sums_the_nearest_layout_keeps_them_exact(parallel: dict[str, Any], tied: bool, nearest: ParallelSection) -> None:
    config = replace(
        config_of(model=ModelSection(num_heads=8, d_model=256, tie_embeddings=tied), **parallel), numerics=NumericsSection(sums="exact")
    )
    assert refusals(config)
    assert nearest_legal(config) == nearest


def test_positions_are_shared_by_both_inner_axes() -> None:
    found = refusals(config_of(seq_len=12, model=ModelSection(num_heads=8, d_model=256), tp=4, cp=2))
    assert any("tp = 4 does not divide data.seq_len / cp = 6" in what for _, what, _ in found)


def test_a_number_of_ranks_that_is_a_slip_is_refused_without_a_search() -> None:
    found = refusals(config_of(dp_shard=1 << 40, tp=4))
    assert found
    assert all("nearest" not in hint for *_, hint in found)
    assert nearest_legal(config_of(dp_shard=2520, tp=4)) == ParallelSection(dp_shard=5040, tp=2)


def test_no_layout_helps_when_something_else_refuses_all() -> None:
    assert refusals(config_of()) == []
    assert nearest_legal(config_of()) == ParallelSection()


def test_the_width_of_the_feed_forward_is_padded_as_the_model_pads_it() -> None:
    assert feed_forward_width(ModelSection(d_model=192)) == 512
    assert feed_forward_width(ModelSection(d_model=24)) == 64
    assert feed_forward_width(ModelSection(d_model=200)) == 576  # 533.3, rounded up
    assert feed_forward_width(ModelSection(d_ff=77)) == 77


@pytest.mark.parametrize(
    ("schedule", "given", "chunks"), [("1f1b", 0, 1), ("interleaved", 0, 2), ("zero_bubble", 0, 2), ("interleaved", 3, 3)]
)
def test_a_schedule_has_the_fewest_pieces_it_works_with(schedule: Any, given: int, chunks: int) -> None:
    assert pipeline_chunks(ParallelSection(pp_schedule=schedule, pp_chunks=given)) == chunks


def test_what_has_no_effect_is_a_doubt_and_no_refusal() -> None:
    assert doubts(config_of(zero_stage=2, dp_shard=2)) == []
    assert doubts(config_of(zero_stage=2, cp=2)) == []
    assert "no effect" in doubts(config_of(zero_stage=1, dp_replicate=2))[0]
    assert "no effect" in doubts(config_of(pp_schedule="interleaved"))[0]
    assert "acts as 1" in doubts(config_of(zero_stage=2, dp_shard=2, pp=2))[0]


def test_a_pipeline_that_idles_is_a_doubt() -> None:
    few = replace(config_of(pp=4, dp_shard=2), train=TrainSection(global_batch_size=16, micro_batch_size=4))
    (doubt,) = doubts(few)
    assert "gets 2 micro-batches a step" in doubt
    assert "idle 71% of the time" in doubt  # 2 of 4 + 3 slots
    assert doubts(replace(few, train=TrainSection(global_batch_size=16, micro_batch_size=2))) == []


def test_the_topology_names_every_axis_and_the_stage() -> None:
    assert topology(ParallelSection(dp_shard=2, tp=2, zero_stage=2)) == {
        "dp_replicate": 1,
        "dp_shard": 2,
        "tp": 2,
        "cp": 1,
        "ep": 1,
        "pp": 1,
        "zero_stage": 2,
        "pp_chunks": 1,
    }
    assert topology(ParallelSection(pp=2, pp_schedule="interleaved"))["pp_chunks"] == 2


def test_what_decides_bits_of_a_layout_reads_old_topologies_too() -> None:
    axes = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "ep": 1, "pp": 1, "pp_chunks": 1}
    assert layout_facts({"dp_replicate": 1, "dp_shard": 1}) == layout_facts(topology(ParallelSection())) == axes
    assert layout_facts(topology(ParallelSection(pp=2))) == {**axes, "pp": 2}
    stages: list[Any] = [1, 2, 3]
    once, twice, thrice = (layout_facts(topology(ParallelSection(dp_shard=2, zero_stage=stage))) for stage in stages)
    assert once == layout_facts({"dp_replicate": 1, "dp_shard": 2}) == {**axes, "dp_shard": 2, "zero_stage": 1}
    assert twice == thrice == {**axes, "dp_shard": 2}
