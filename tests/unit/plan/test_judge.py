from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.hardware import accelerator
from surefoot.plan.layouts.calibration import DEFAULT
from surefoot.plan.layouts.judge import judge
from surefoot.plan.layouts.layout_text import parse_layout, show_layout
from surefoot.plan.layouts.legality import Limits
from surefoot.plan.layouts.recipe import beside, recipe_layout
from surefoot.plan.layouts.search import rank
from surefoot.plan.layouts.smallest_change import smallest_change
from surefoot.plan.memory import estimate as memory
from surefoot.plan.records import FP32, Layout, Workload
from tests.unit.plan.models import LLAMA_8B, LLAMA_70B, LLAMA_405B

H100 = accelerator("h100")
WORK = Workload(LLAMA_8B, 4096, 256)


def kinds(layout: Layout, *, workload: Workload = WORK, limits: Limits | None = None) -> set[str]:
    return {refusal.kind for refusal in judge(workload, H100, layout, limits=limits or Limits(), play=False).refusals}


def test_a_layout_that_can_be_run_has_no_refusals() -> None:
    told = judge(WORK, H100, Layout(tp=4, dp_shard=16, micro_batch_size=2))
    assert told.legal
    assert told.fits
    assert told.trainable
    assert told.waste == 0.0
    assert told.mfu == pytest.approx(WORK.flops_per_step / (told.step_s * 64 * 989.4e12))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(tp=16), "node"),
        (Layout(tp=3), "tp"),
        (Layout(cp=3), "cp"),
        (Layout(cp=16), "cp"),
        (Layout(dp_shard=512), "batch"),
        (Layout(ep=2, dp_shard=2), "ep"),
        (Layout(pp=4, pp_chunks=2), "schedule"),
        (Layout(pp=4, pp_schedule="interleaved"), "schedule"),
        (Layout(pp=4, pp_schedule="zero_bubble", pp_chunks=2, recompute="full"), "schedule"),
        (Layout(pp=16, dp_shard=16), "bubble"),
        (Layout(dp_replicate=8), "memory"),
    ],
)
def test_each_refusal_has_its_kind(layout: Layout, kind: str) -> None:
    assert kind in kinds(layout)
    assert kind not in kinds(Layout(tp=2, dp_shard=32))


def test_experts_divide_data_ranks_and_experts() -> None:
    work = replace(WORK, sizes=replace(LLAMA_8B, num_experts=48, experts_per_token=2, d_ff=1024))
    assert "ep" not in kinds(Layout(dp_shard=16, ep=16), workload=work)
    assert "ep" in kinds(Layout(dp_shard=16, ep=3), workload=work)
    assert "ep" in kinds(Layout(dp_shard=32, ep=32), workload=work)


def test_limits_are_the_users() -> None:
    assert "node" not in kinds(Layout(tp=16, dp_shard=4), limits=Limits(tp_beyond_node=True))
    assert "bubble" not in kinds(Layout(pp=16, dp_shard=16), limits=Limits(max_bubble=0.6))


def test_a_bubble_is_told_both_ways_and_as_played() -> None:
    told = judge(WORK, H100, Layout(tp=2, pp=4, dp_shard=8)).bubble.as_dict()
    assert told["idle_of_ideal"] == pytest.approx(3 / 32)
    assert told["idle_of_total"] == pytest.approx(3 / 35)
    assert told["peak_in_flight"] == [4, 3, 2, 1]
    assert told["simulated_idle_of_total"] > told["idle_of_total"]  # type: ignore[operator]  # stages are not equal


def test_sequences_that_do_not_divide_are_phantoms() -> None:
    told = judge(replace(WORK, global_batch_size=250), H100, Layout(dp_shard=64))
    assert told.waste == pytest.approx(1 - 250 / 256)


def test_phantoms_do_not_fill_a_bubble() -> None:
    """Two micro-batches over 8 stages run as 8: idle 7 / 15 of the time, and three quarters of the rest."""
    (refusal,) = (one for one in judge(WORK, H100, Layout(pp=8, dp_shard=128)).refusals if one.kind == "bubble")
    assert "2 micro-batches over pp = 8 idle 87%" in refusal.why


def test_more_pieces_than_layers_have_no_time() -> None:
    with pytest.raises(PlanInfeasible, match="32 layers cannot be dealt to 64 pieces"):
        judge(WORK, H100, Layout(pp=32, pp_schedule="interleaved", pp_chunks=2))


def test_single_precision_runs_at_its_own_peak() -> None:
    half, whole = (judge(replace(WORK, dtypes=dtypes), H100, Layout(dp_shard=64), play=False).step_s for dtypes in (WORK.dtypes, FP32))
    assert whole > 5 * half


def test_a_record_is_what_json_needs() -> None:
    told = judge(WORK, H100, Layout(tp=2, pp=2, dp_shard=16), calibration=DEFAULT).as_dict()
    keys = {"tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "memory", "bubble", "mfu", "step_s", "tokens_per_s", "trainable"}
    assert keys <= told.keys()


def test_a_layout_as_people_write_it() -> None:
    assert parse_layout("tp=8,pp=8", num_devices=512) == Layout(tp=8, pp=8, dp_shard=8)
    assert parse_layout("tp=8, dp=64, dp_replicate=8, zero=1, mbs=2", num_devices=512) == Layout(
        tp=8, dp_shard=8, dp_replicate=8, zero_stage=1, micro_batch_size=2
    )
    assert parse_layout("dp_replicate=4,dp_shard=2", num_devices=8) == Layout(dp_replicate=4, dp_shard=2)
    assert parse_layout("pp=4,vp=2,recompute=full", num_devices=8) == Layout(
        pp=4, dp_shard=2, pp_schedule="interleaved", pp_chunks=2, recompute="full"
    )
    assert parse_layout("pp=4,pp_schedule=zero_bubble", num_devices=4).pp_chunks == 2
    assert parse_layout("ep=4,dp=8", num_devices=8).ep == 4
    assert parse_layout("", num_devices=8) == Layout(dp_shard=8)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dp_shards=8", "'dp_shards' is no axis .* did you mean dp_shard?"),
        ("tp", "is not name=value"),
        ("tp=eight", "tp = 'eight'"),
        ("tp=0", "tp = '0'"),
        ("tp=2,tp=4", "given twice"),
        ("zero_stage=4", "1, 2 or 3"),
        ("recompute=some", "one of none, selective, full"),
        ("tp=3", "come to 3 devices, not 64"),
        ("tp=8,pp=8,dp=8", "come to 512 devices, not 64 .* ep divides dp"),
        ("dp=64,dp_shard=5", "dp_shard = 5 does not divide dp = 64"),
        ("dp=64,dp_shard=8,dp_replicate=4", "dp_shard \\* dp_replicate = 32"),
    ],
)
def test_slips_are_named(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        parse_layout(text, num_devices=64)
    assert refused.value.where == "--layout"


def test_a_layout_is_shown_in_a_line() -> None:
    assert show_layout(Layout()) == "micro-batch 1"
    layout = Layout(tp=8, pp=4, dp_shard=2, pp_schedule="interleaved", pp_chunks=2, recompute="full", micro_batch_size=2)
    assert show_layout(layout) == "tp 8, pp 4, dp_shard 2, interleaved x2, zero 3, recompute full, micro-batch 2"


def test_the_recipe_fills_a_node_and_stops_where_it_fits() -> None:
    work = Workload(LLAMA_70B, 4096, 1024)
    recipe = recipe_layout(work, H100, 512)
    assert (recipe.layout.tp, recipe.layout.zero_stage) == (8, 1)
    assert recipe.fits
    fewer = replace(recipe.layout, pp=recipe.layout.pp // 2, dp_shard=recipe.layout.dp_shard * 2)
    assert not judge(work, H100, fewer).fits
    compared = beside(recipe, rank(work, H100, 512).best)
    assert compared.slower > 0.05
    assert "tensor parallel +" in compared.why


def test_the_recipe_is_refused_where_it_never_fits() -> None:
    with pytest.raises(PlanInfeasible, match="fits with no number of stages"):
        recipe_layout(Workload(LLAMA_405B, 8192, 64), H100, 16)


def test_the_best_compared_with_itself_is_no_slower() -> None:
    best = rank(WORK, H100, 8).best
    assert beside(best, best).slower == 0.0
    assert "as fast" in beside(best, best).why


def test_a_setting_is_changed_before_an_axis() -> None:
    layout = Layout(tp=8, dp_shard=8, micro_batch_size=8)
    work = Workload(LLAMA_70B, 8192, 512)
    assert not judge(work, H100, layout).fits
    (change,) = smallest_change(work, H100, 64, layout=layout)
    assert (change.kind, change.what) == ("setting", "recompute none -> full")
    assert judge(work, H100, change.judged.layout).legal


def test_an_axis_is_changed_where_no_setting_helps() -> None:
    layout = Layout(tp=8, dp_replicate=8)
    (change,) = smallest_change(Workload(LLAMA_70B, 4096, 512), H100, 64, layout=layout)
    assert change.kind == "layout"
    assert change.judged.layout.num_devices == 64
    assert change.judged.legal
    assert change.judged.layout.tp == 8  # the axis that was not in the way


def test_where_nothing_fits_each_way_out_is_the_smallest() -> None:
    work = Workload(LLAMA_405B, 8192, 64)
    changes = {change.kind: change for change in smallest_change(work, H100, 64)}
    assert list(changes) == [kind for kind in ("batch", "bubble", "node", "sequence", "devices", "card") if kind in changes]
    assert changes["devices"].judged.layout.num_devices == 128
    assert not rank(work, H100, 64, num_ranked=1).layouts
    assert changes["card"].what.startswith("h200")


def test_a_batch_too_small_for_its_devices_is_made_larger_or_told_the_bubble_that_it_costs() -> None:
    """4 short sequences over 32 nodes of one device: what data ranks and cp leave over are stages that wait."""
    work, alone = Workload(LLAMA_8B, 1024, 4), replace(H100, devices_per_node=1)
    assert not rank(work, alone, 32).layouts
    larger, waiting = smallest_change(work, alone, 32)[:2]
    assert (larger.kind, waiting.kind) == ("batch", "bubble")
    assert waiting.judged.layout.pp >= 4
    assert not larger.judged.refusals
    assert not waiting.judged.refusals


@pytest.mark.parametrize("sizes", [LLAMA_8B, LLAMA_70B], ids=["8B", "70B"])
def test_a_batch_of_seven_on_992_devices_is_named_and_cured(sizes: ModelSizes) -> None:
    """Phantoms fill the pipelines, so a closed form of full ones would offer a bubble that is under the bound already."""
    work = Workload(sizes, 4096, 7)
    assert rank(work, H100, 992).why.startswith("the batch of 7 sequences is too small")
    changes = {change.kind: change for change in smallest_change(work, H100, 992)}
    assert next(iter(changes)) == "batch"
    enough = replace(work, global_batch_size=int(changes["batch"].what.split()[3]))
    assert rank(enough, H100, 992).layouts
    percent = int(changes["bubble"].what.split()[3].rstrip("%"))
    assert percent > 15
    assert rank(work, H100, 992, max_bubble=percent / 100).layouts


def test_a_batch_is_not_blamed_for_what_memory_refuses() -> None:
    work = Workload(LLAMA_405B, 8192, 32)
    assert rank(work, H100, 64).why.startswith("needs ")
    assert "batch" not in {change.kind for change in smallest_change(work, H100, 64)}


def test_an_odd_sequence_is_told_as_the_reason_where_it_leaves_no_tp_and_no_cp() -> None:
    told = [one.reason for one in rank(Workload(LLAMA_8B, 4095, 512), H100, 64).rejected]
    assert "tp = 2 does not divide the 4095 positions of a rank" in told
    assert "cp = 2 does not cut a sequence of 4095 into two equal pieces for each rank" in told
    assert not any("2047" in reason for reason in told)  # half of it, which nobody has


def test_another_memory_estimate_can_be_asked() -> None:
    """Twice as heavy: what fitted does not."""
    layout = Layout(tp=2, dp_shard=4, recompute="full")
    real = judge(WORK, H100, layout)

    def heavy(workload: Workload, layout: Layout) -> memory.Memory:
        told = memory.estimate(workload, layout)
        return replace(told, activations=told.activations + 80e9)

    assert real.fits
    assert not judge(WORK, H100, layout, memory=heavy).fits
