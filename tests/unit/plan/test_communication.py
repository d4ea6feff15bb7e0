from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.plan.hardware import accelerator
from surefoot.plan.layouts import communication as talk
from surefoot.plan.layouts.communication import ONE_LAYER, Traffic, Wires, weights_of_stage
from surefoot.plan.layouts.links import (
    FABRIC_HOP_S,
    NODE_HOP_S,
    START_S,
    Group,
    LinkRates,
    gather_s,
    group_at,
    groups_of,
    reduce_s,
    ring_bandwidth,
)
from surefoot.plan.layouts.throughput import StepModel
from surefoot.plan.memory.estimate import estimate
from surefoot.plan.memory.implementations import MEGATRON, NANOTRON, SUREFOOT_BF16
from surefoot.plan.memory.stage_shares import stage_shares
from surefoot.plan.records import Dtypes, Layout, Workload
from tests.unit.plan.models import LLAMA_8B

H100 = accelerator("h100")
DATA_SHEET = LinkRates(bandwidth=1.0, latency=1.0, rails=1.0)
WIRES = Wires(H100, DATA_SHEET)
HALF = Dtypes(weight=2, grad=2, master=4, moments=8, activation=2, reduce=2)
WORK = Workload(LLAMA_8B, 4096, 256, HALF)
WEIGHTS = weights_of_stage(LLAMA_8B, stage_shares(LLAMA_8B, pp=1, chunks=1, balance="blocks")[0], tp=1, ep=1)


def sharding(layout: Layout, *, number: int = 1) -> Traffic:
    groups = groups_of(layout, H100.devices_per_node)
    return talk.of_sharding(
        WORK, layout, WEIGHTS, num_micro_batches=number, group=groups["shard"], wires=WIRES, implementation=MEGATRON
    )  # fmt: skip


def replicas(layout: Layout) -> Traffic:
    return talk.of_replicas(WORK, layout, WEIGHTS, group=groups_of(layout, H100.devices_per_node)["dp_replicate"], wires=WIRES)


def test_ranks_are_placed_as_the_mesh_places_them() -> None:
    """tp innermost, pp outermost: what talks inside every layer stays in the node."""
    groups = groups_of(Layout(tp=4, cp=2, dp_shard=4, dp_replicate=2, pp=2), 8)
    assert groups["tp"] == Group(4, 4)
    assert groups["cp"] == Group(2, 2)
    assert groups["shard"] == Group(8, 2)
    assert groups["dp_replicate"] == Group(2, 1)
    assert groups["pp"] == Group(2, 1)
    assert groups["pp"].leaves_node
    assert group_at(124, stride=1, devices_per_node=8).num_nodes == 16  # 15 nodes and a half


def test_stages_1_and_2_move_what_an_all_reduce_does_and_stage_3_half_as_much_again() -> None:
    """arXiv 1910.02054, section 7; with one micro-batch and one dtype."""
    whole = replicas(Layout(dp_replicate=64)).num_bytes
    assert whole == pytest.approx(2 * 63 / 64 * WEIGHTS.dense * 2)
    told = [sharding(Layout(dp_shard=64, zero_stage=stage)).num_bytes / whole for stage in (1, 2, 3)]
    assert told == pytest.approx([1.0, 1.0, 1.5])


def test_each_micro_batch_costs_stage_3_both_gathers_and_stage_2_a_reduction() -> None:
    one, four = ([sharding(Layout(dp_shard=64, zero_stage=s), number=n).num_bytes for s in (1, 2, 3)] for n in (1, 4))
    assert [many / few for many, few in zip(four, one, strict=True)] == pytest.approx([1.0, 2.5, 4.0])
    pipelined = [sharding(Layout(dp_shard=64, pp=2, zero_stage=2), number=number).num_bytes for number in (1, 4)]
    assert pipelined[0] == pipelined[1]  # a pipeline reduces once a step


def test_two_levels_move_less_between_nodes() -> None:
    flat, hybrid = replicas(Layout(dp_replicate=64)), replicas(Layout(dp_shard=8, dp_replicate=8))
    assert hybrid.num_bytes == pytest.approx(2 * 7 / 8 * WEIGHTS.dense * 2 / 8)
    assert hybrid.seconds < flat.seconds


def test_tensor_parallel_gathers_and_reduces_twice_in_a_layer_each_way() -> None:
    group = Group(8, 8)
    sent = talk.of_tensor_layer(WORK, tokens=4096, group=group, wires=WIRES, recompute="none")
    assert sent.num_bytes == pytest.approx(8 * 7 / 8 * 4096 * 4096 * 2)
    again = talk.of_tensor_layer(WORK, tokens=4096, group=group, wires=WIRES, recompute="full")
    assert again.num_bytes == pytest.approx(1.5 * sent.num_bytes)
    assert talk.of_tensor_layer(WORK, tokens=4096, group=Group(1, 1), wires=WIRES, recompute="none").num_bytes == 0


def test_grouped_queries_make_context_parallel_cheap() -> None:
    few, many = (
        talk.of_context_layer(
            replace(WORK, sizes=replace(LLAMA_8B, num_kv_heads=heads)), sequences=1, tp=1, group=Group(4, 4), wires=WIRES, recompute="none"
        ).num_bytes
        for heads in (8, 32)
    )
    assert many == pytest.approx(4 * few)
    assert few == pytest.approx(2 * 3 / 4 * 4096 * 2 * 8 * 128 * 2)


def test_experts_are_exchanged_four_times_and_between_nodes_slowly() -> None:
    sizes = replace(LLAMA_8B, num_experts=64, experts_per_token=2, d_ff=1024)
    work = replace(WORK, sizes=sizes)
    inside, outside = (
        talk.of_expert_layer(work, tokens=4096, tp=1, group=group, wires=WIRES, recompute="none") for group in (Group(8, 8), Group(8, 1))
    )
    assert inside.num_bytes == outside.num_bytes == pytest.approx(4 * 7 / 8 * 4096 * 2 * 4096 * 2)
    assert outside.seconds > 5 * inside.seconds
    local = weights_of_stage(sizes, ONE_LAYER, tp=1, ep=8).experts
    assert local == pytest.approx(weights_of_stage(sizes, ONE_LAYER, tp=1, ep=1).experts / 8)


def test_a_pipeline_passes_one_tensor_cut_over_tp() -> None:
    sent = talk.of_passing(WORK, tokens=4096, tp=8, group=Group(4, 1), wires=WIRES)
    assert sent.num_bytes == 4096 * 4096 * 2 / 8
    assert sent.seconds == pytest.approx(sent.num_bytes / 50e9 + FABRIC_HOP_S)


def test_what_is_passed_on_takes_the_time_and_the_memory_of_the_residual_stream() -> None:
    """float32 beside products in bf16: the same bytes for a message, for the traffic of a step and for the buffers that receive it."""
    work, layout = replace(WORK, dtypes=SUREFOOT_BF16), Layout(tp=2, pp=4, dp_shard=8)
    one = 4096 * 4096 * 4 / 2
    assert talk.of_passing(work, tokens=4096, tp=2, group=Group(4, 1), wires=WIRES).num_bytes == one
    step = StepModel(work, H100).step(layout)
    assert step.traffic["pp"].num_bytes == 2 * step.num_micro_batches * one
    some, more = (estimate(replace(work, global_batch_size=number), layout, stage=1) for number in (64, 128))
    assert more.communication_buffers - some.communication_buffers == 2 * 8 * one


def test_a_ring_takes_a_hop_for_each_rank_and_the_link_of_its_slowest_step() -> None:
    node = Group(8, 8)
    assert gather_s(8e9, node, H100, DATA_SHEET) == pytest.approx(7e9 / 450e9 + START_S + 7 * NODE_HOP_S)
    two = Group(16, 8)
    assert gather_s(8e9, two, H100, DATA_SHEET) == pytest.approx(7.5e9 / 400e9 + START_S + 14 * NODE_HOP_S + FABRIC_HOP_S)
    assert gather_s(8e9, Group(16, 1), H100, DATA_SHEET) > 7.5e9 / 50e9  # one network card each, not eight
    assert gather_s(0.0, two, H100, DATA_SHEET, num_messages=10) == pytest.approx(10 * gather_s(0.0, two, H100, DATA_SHEET))
    assert ring_bandwidth(two, H100, replace(DATA_SHEET, rails=0.0)) == 50e9


def test_a_tree_beats_a_ring_of_many_nodes() -> None:
    far = Group(512, 1)
    assert reduce_s(0.0, far, H100, DATA_SHEET) == pytest.approx(2 * 9 * FABRIC_HOP_S)
    assert reduce_s(0.0, far, H100, DATA_SHEET) < gather_s(0.0, far, H100, DATA_SHEET)
    slow = replace(DATA_SHEET, latency=3.0, bandwidth=0.5)
    assert gather_s(1e9, far, H100, slow) > 2 * gather_s(1e9, far, H100, DATA_SHEET)


def test_tensor_by_tensor_costs_more_messages() -> None:
    layout = Layout(dp_shard=256, zero_stage=1)
    group = groups_of(layout, 8)["shard"]
    told = [
        talk.of_sharding(WORK, layout, WEIGHTS, num_micro_batches=1, group=group, wires=WIRES, implementation=program)
        for program in (MEGATRON, NANOTRON)
    ]
    assert told[0].num_bytes == told[1].num_bytes
    assert told[1].seconds > 1.5 * told[0].seconds
