"""Terms of the memory of a device, and the mistakes that calculators were found to make: each has a test."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from surefoot.core.errors import PlanInfeasible
from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.memory.estimate import EXCLUDED, TERMS, Memory, estimate, fits, fragmentation_of, told
from surefoot.plan.memory.implementations import IMPLEMENTATIONS, MEGATRON, NANOTRON, SUREFOOT, SUREFOOT_BF16
from surefoot.plan.records import FP32, Layout, Workload

LLAMA = ModelSizes(32000, 32, 4096, 32, 32, 128, 11008, 0, False, False)
GQA = replace(LLAMA, num_kv_heads=8)
SPARSE = replace(LLAMA, d_ff=1024, num_experts=64, experts_per_token=6, num_shared_experts=2)
WORKLOAD = Workload(LLAMA, seq_len=4096, global_batch_size=256)
LARGE = Layout(tp=8, pp=8, dp_shard=8, zero_stage=1)


def megatron(layout: Layout, *, workload: Workload = WORKLOAD, stage: int | None = None) -> Memory:
    return estimate(workload, layout, stage=stage, implementation=MEGATRON)


def test_states_of_one_device_are_16_and_18_bytes_a_parameter() -> None:
    alone = estimate(replace(WORKLOAD, dtypes=SUREFOOT_BF16), Layout())
    assert alone.num_parameters == LLAMA.num_parameters
    assert alone.states == 16 * LLAMA.num_parameters
    assert megatron(Layout()).states == 18 * LLAMA.num_parameters


def test_gradients_are_divided_by_tensor_and_pipeline_ranks_below_stage_2() -> None:
    """A calculator said 28 GiB where this is 0.4."""
    memories = [megatron(LARGE, stage=stage) for stage in range(8)]
    assert sum(8 * memory.gradients for memory in memories) == pytest.approx(4 * LLAMA.num_parameters, rel=1e-3)
    assert sum(8 * memory.parameters for memory in memories) == pytest.approx(2 * LLAMA.num_parameters, rel=1e-3)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_each_stage_of_zero_divides_what_it_names_by_the_data_ranks_once(zero_stage: Any) -> None:
    """A calculator divided parameters by all devices after tp and pp had divided them: 0.00 GiB."""
    held = megatron(replace(LARGE, pp=1, zero_stage=zero_stage))
    share = held.num_parameters / 8
    assert held.num_parameters == pytest.approx(LLAMA.num_parameters / 8, rel=1e-3)
    assert held.parameters == pytest.approx(2 * (share if zero_stage == 3 else 8 * share))
    assert held.gradients == pytest.approx(4 * (share if zero_stage >= 2 else 8 * share))
    assert held.optimizer == pytest.approx(12 * share)


def test_a_higher_stage_never_needs_more_states_and_stage_1_beats_none() -> None:
    """An estimator put stage 3 above stage 2."""
    states = [megatron(Layout(dp_shard=64, zero_stage=stage)).states for stage in (1, 2, 3)]
    assert megatron(Layout(dp_replicate=64)).states > states[0] > states[1] > states[2]


def test_whole_copies_beside_shards_divide_nothing_further() -> None:
    shards = estimate(WORKLOAD, Layout(dp_shard=8))
    copies = estimate(replace(WORKLOAD, global_batch_size=1024), Layout(dp_shard=8, dp_replicate=4))
    assert copies.states == shards.states


def test_shards_that_are_gathered_for_use_are_counted_beside_themselves() -> None:
    """70B over 64 ranks is 17.5 GB of states and a layer or two gathered: "about 2 GB" counts one of four things."""
    sizes = ModelSizes(32000, 80, 8192, 64, 8, 128, 28672, 0, False, False)
    stage_3 = estimate(Workload(sizes, 4096, 64, SUREFOOT_BF16), Layout(dp_shard=64))
    stage_2 = estimate(Workload(sizes, 4096, 64, SUREFOOT_BF16), Layout(dp_shard=64, zero_stage=2))
    assert stage_3.states == pytest.approx(16 * sizes.num_parameters / 64)
    layer = sizes.attention_matrices + sizes.expert_matrices
    assert stage_3.unsharded == pytest.approx(4 * 2 * layer, rel=0.01)
    assert stage_2.unsharded == pytest.approx(4 * sizes.num_parameters)


def test_a_block_keeps_what_the_paper_counts() -> None:
    """arXiv 2205.05198: 34 s b h with dropout and a GELU of 4 h. SwiGLU at 8 / 3 h and no dropout, fused attention: 32 s b h."""
    paper = 34 * 4096 * 4096
    assert megatron(Layout(), stage=0).activations / 32 == pytest.approx(paper, rel=0.06)


def saved_per_score(*, dropout: float) -> float:
    """Bytes of one (head, query, key) that autograd keeps of an attention in bf16 that is not fused, counted at 64 positions."""
    heads, positions = 2, 64
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1] == positions == tensor.shape[-2]:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    queries, keys, values = (torch.randn(heads, positions, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = torch.softmax(queries @ keys.transpose(-2, -1), dim=-1)
        if dropout:
            scores, _ = torch.native_dropout(scores, dropout, True)
        _ = scores @ values
    return sum(kept.values()) / (heads * positions**2)


def test_scores_are_kept_where_attention_is_not_fused_and_selective_drops_only_them() -> None:
    unfused = replace(WORKLOAD, fused_attention=False)
    softmax = saved_per_score(dropout=0.0)
    assert saved_per_score(dropout=0.1) == softmax + 1 + 2  # arXiv 2205.05198 counts 5 with the mask and the output of a dropout
    scores = softmax * 32 * 4096**2 * 32
    assert megatron(Layout(), workload=unfused).activations - megatron(Layout()).activations == pytest.approx(scores)
    assert megatron(Layout(recompute="selective"), workload=unfused).activations == megatron(Layout()).activations


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
def test_recomputing_more_keeps_less(implementation: Any) -> None:
    """A report gave full recomputation the activations of no sequence parallel, more than selective."""
    none, selective, full = (
        estimate(WORKLOAD, replace(LARGE, recompute=mode), implementation=implementation)
        for mode in ("none", "selective", "full")
    )  # fmt: skip
    assert full.activations < 0.3 * selective.activations <= 0.3 * none.activations
    assert full.workspace > none.workspace
    assert full.total < selective.total <= none.total


def test_full_recomputation_keeps_the_inputs_of_blocks_and_one_block_at_work() -> None:
    full = megatron(replace(LARGE, recompute="full"), stage=0)
    assert full.activations == 8 * 4 * 2 * 4096 * 4096 / 8  # in flight x layers x bytes x positions x width / tp
    none = megatron(LARGE, stage=0)
    assert full.workspace - none.workspace == pytest.approx(none.activations / (8 * 4))


def test_interleaving_keeps_more_by_the_published_factor() -> None:
    once = megatron(LARGE, stage=0).activations
    twice = megatron(replace(LARGE, pp_schedule="interleaved", pp_chunks=2), stage=0).activations
    assert twice / once == pytest.approx(1 + 7 / (8 * 2))


def test_micro_batches_in_flight_are_those_of_the_schedule_and_no_more_than_there_are() -> None:
    stages = [megatron(LARGE, stage=stage).activations for stage in range(8)]
    assert stages == [stages[7] * (8 - stage) for stage in range(8)]
    few = replace(WORKLOAD, global_batch_size=3 * 8)
    assert megatron(LARGE, workload=few, stage=0).activations == stages[7] * 3
    held_back = replace(LARGE, pp_schedule="zero_bubble")
    assert megatron(held_back, stage=7).activations == stages[0]


def test_positions_are_split_by_tensor_and_context_parallel_alike() -> None:
    """At a million positions tensor parallel alone is not enough, whatever is recomputed: context parallel is what divides further."""
    long = Workload(replace(LLAMA, num_layers=80, d_model=8192, num_heads=64, num_kv_heads=64, d_ff=28672), 1 << 20, 1)
    eight = megatron(Layout(tp=8, recompute="full"), workload=long)
    assert eight.activations > 160e9
    assert megatron(Layout(tp=8, cp=16, recompute="full"), workload=long).activations == pytest.approx(eight.activations / 16)


def test_keys_of_all_positions_stay_where_context_parallel_gathers_them() -> None:
    one, two = (estimate(Workload(GQA, 4096, 8, FP32), Layout(cp=cp)).activations for cp in (1, 2))
    keys = 2 * 4 * 8 * 128 * 4096 * 32
    assert two == pytest.approx(one / 2 + keys / 2)


def test_grouped_queries_keep_fewer_keys_and_hold_fewer_parameters() -> None:
    grouped, single = megatron(Layout(), workload=replace(WORKLOAD, sizes=GQA)), megatron(Layout())
    assert grouped.num_parameters < single.num_parameters
    assert single.activations - grouped.activations == 32 * 4096 * 2 * 2 * 24 * 128


def test_experts_are_divided_by_their_ranks_and_activations_are_not() -> None:
    """Two programs let expert parallel shrink what a rank keeps: it moves tokens, each has as many experts as before."""
    workload = replace(WORKLOAD, sizes=SPARSE)
    one, eight = (megatron(Layout(dp_shard=8, ep=ep, zero_stage=1), workload=workload) for ep in (1, 8))
    experts = 32 * 64 * SPARSE.expert_matrices
    assert one.num_parameters == SPARSE.num_parameters
    assert one.num_parameters - eight.num_parameters == experts * 7 / 8
    assert eight.activations == one.activations
    assert eight.optimizer == pytest.approx(one.optimizer)  # on one data rank of 8 each, or shared out over 8


@pytest.mark.parametrize(("tp", "ep"), [(2, 8), (4, 2), (1, 16)])
def test_experts_are_cut_by_tensor_ranks_too_whatever_their_product_is(tp: int, ep: int) -> None:
    memory = megatron(Layout(tp=tp, dp_shard=16, ep=ep, zero_stage=1), workload=replace(WORKLOAD, sizes=SPARSE))
    dense = replace(SPARSE, num_experts=0, experts_per_token=0, d_ff=2 * SPARSE.d_ff, num_shared_experts=0)
    experts = 32 * 64 * SPARSE.expert_matrices / (tp * ep)
    routers = 32 * 64 * 4096
    assert memory.num_parameters - experts - routers == pytest.approx(dense.num_parameters / tp, rel=0.001)


def test_experts_that_a_token_does_not_see_keep_nothing_for_it() -> None:
    few, many = (megatron(Layout(), workload=replace(WORKLOAD, sizes=replace(SPARSE, num_experts=number))) for number in (16, 64))
    scores = 32 * 4096 * 2 * 4 * 48
    assert many.activations - few.activations == scores
    more = megatron(Layout(), workload=replace(WORKLOAD, sizes=replace(SPARSE, experts_per_token=12)))
    assert more.activations > 1.4 * many.activations


def test_logits_count_on_the_last_stage_only_and_are_cut_by_tensor_ranks() -> None:
    large = replace(WORKLOAD, sizes=replace(LLAMA, vocab_size=131072))
    inner, last = (megatron(LARGE, workload=large, stage=stage) for stage in (6, 7))
    assert inner.logits_and_loss == 0
    assert last.logits_and_loss == 8 * 4096 * 131072 / 8


def test_a_matrix_at_both_ends_of_a_pipeline_is_there_twice_and_without_one_once() -> None:
    tied = replace(WORKLOAD, sizes=replace(LLAMA, tie_embeddings=True))
    parts = [estimate(tied, Layout(pp=2), stage=stage).num_parameters for stage in (0, 1)]
    assert sum(parts) == LLAMA.num_parameters
    assert estimate(tied, Layout()).num_parameters == LLAMA.num_parameters - 32000 * 4096


def test_weights_that_each_forward_casts_are_kept_with_its_activations() -> None:
    cast = replace(WORKLOAD, dtypes=SUREFOOT_BF16)
    matrices = LLAMA.num_parameters - 32000 * 4096 - (2 * 32 + 1) * 4096
    assert estimate(cast, Layout()).cast_weights == 2 * matrices
    assert estimate(WORKLOAD, Layout()).cast_weights == 0
    assert estimate(cast, Layout(recompute="full")).cast_weights == 2 * 32000 * 4096  # of the head: no block


def test_a_pipeline_of_torch_receives_into_a_buffer_for_each_micro_batch() -> None:
    some, more = (estimate(replace(WORKLOAD, global_batch_size=number), Layout(pp=4), stage=1) for number in (16, 32))
    assert more.communication_buffers - some.communication_buffers == 2 * 16 * 2 * 4096 * 4096
    assert more.activations == some.activations


@pytest.mark.parametrize("implementation", [SUREFOOT, MEGATRON, NANOTRON], ids=lambda one: one.name)
def test_the_stage_that_needs_most_is_found_without_asking_all(implementation: Any) -> None:
    schedules: tuple[tuple[Any, int], ...] = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2))
    for (schedule, chunks), pp, num_layers, batch in itertools.product(schedules, (2, 3, 8), (17, 18, 40), (8, 64)):
        sizes = replace(LLAMA, num_layers=num_layers, vocab_size=131072)
        layout = Layout(pp=pp, pp_schedule=schedule, pp_chunks=chunks)
        workload = Workload(sizes, 4096, batch)
        asked = [estimate(workload, layout, stage=stage, implementation=implementation).total for stage in range(pp)]
        assert estimate(workload, layout, implementation=implementation).total == max(asked)


def test_every_term_is_told_with_its_reason_and_nothing_else_is_in_the_total() -> None:
    memory = estimate(replace(WORKLOAD, dtypes=SUREFOOT_BF16), Layout(tp=2, pp=2, dp_shard=8))
    lines = told(memory)
    assert sum(size for _, size, _ in lines) == pytest.approx(memory.total)
    assert [name for name, _, _ in lines] == list(TERMS)
    assert {field.name for field in fields(Memory)} - TERMS.keys() == {"stage", "num_parameters", "num_parameters_sharded"}
    assert all(reason.why and reason.source for _, _, reason in lines)
    assert memory.as_dict()["total"] == memory.total
    assert memory.reserved < memory.total
    assert any("routing" in what for what in EXCLUDED)


def test_a_card_must_hold_a_margin_too() -> None:
    memory = megatron(LARGE)
    assert fits(memory, memory.total * 1.07)
    assert not fits(memory, memory.total * 1.05)
    assert fits(memory, memory.total, margin=0.0)


def test_a_share_of_fragmentation_is_found_back_past_an_outlier() -> None:
    memories = [estimate(WORKLOAD, Layout(tp=tp, micro_batch_size=size)) for tp, size in itertools.product((1, 2, 4), (1, 2))]
    peaks = [(memory, memory.allocated + memory.fragmentation * 0.2 / 0.095) for memory in memories]
    assert fragmentation_of([*peaks, (memories[0], 2 * memories[0].total)]) == pytest.approx(0.2)
    with pytest.raises(PlanInfeasible):
        fragmentation_of([])


def test_stages_without_layers_and_stages_that_are_not_there_are_refused() -> None:
    with pytest.raises(PlanInfeasible, match="32 layers cannot be dealt to 64 pieces"):
        estimate(WORKLOAD, Layout(pp=16, pp_chunks=4, pp_schedule="interleaved"))
    with pytest.raises(PlanInfeasible, match="no stage 2"):
        estimate(WORKLOAD, Layout(pp=2), stage=2)
