from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.core.errors import ConfigError
from surefoot.plan.hardware import accelerator
from surefoot.plan.layouts.calibration import DEFAULT, Calibration
from surefoot.plan.layouts.pipeline_timeline import simulate
from surefoot.plan.layouts.throughput import StepModel, StepTime
from surefoot.plan.memory.implementations import MEGATRON, SUREFOOT
from surefoot.plan.records import Layout, Workload
from tests.unit.plan.models import LLAMA_8B, LLAMA_70B, llama

H100 = accelerator("h100")
WORK = Workload(LLAMA_8B, 4096, 256)
PERFECT = Calibration(
    products=1.0, attention=1.0, memory=1.0, link=1.0, latency=1.0, hidden_tensor=0.0, hidden_data=0.0, rails=1.0, error=0.0
)


def step(layout: Layout, *, workload: Workload = WORK, calibration: Calibration = DEFAULT) -> StepTime:
    return StepModel(workload, H100, calibration).step(layout)


def test_the_parts_of_a_step_sum_to_it() -> None:
    told = step(Layout(tp=2, pp=4, cp=2, dp_shard=2, dp_replicate=2)).as_dict()
    names = ("compute_s", "tensor_s", "context_s", "expert_s", "passing_s", "bubble_s", "data_s", "update_s")
    assert sum(told[name] for name in names) == pytest.approx(told["total_s"])  # type: ignore[misc]  # JSON
    assert all(told[name] > 0 for name in names if name != "expert_s")  # type: ignore[operator]  # JSON
    assert set(told["traffic"]) == {"tp", "cp", "pp", "dp_shard", "dp_replicate"}  # type: ignore[call-overload]  # JSON


def test_one_perfect_device_is_as_fast_as_its_peak_and_its_memory() -> None:
    """Products alone take the exact FLOPs over the peak, but for half a forward of attention that a fused backward does again."""
    work = Workload(LLAMA_8B, 4096, 8)
    endless = replace(H100, memory_bandwidth=1e30)
    seconds = StepModel(work, endless, PERFECT).step(Layout()).total_s
    again = 0.5 * 4 * 32 * 128 * (4096 * 4097 / 2) * 32 * 8
    assert seconds == pytest.approx((work.flops_per_step + again) / 989.4e12, rel=1e-6)
    model = StepModel(work, endless, PERFECT)
    assert model.mfu(seconds, 1) == pytest.approx(work.flops_per_step / seconds / 989.4e12)


def test_recomputation_costs_and_is_no_use() -> None:
    none, selective, full = (step(Layout(dp_shard=64, recompute=how)).compute_s for how in ("none", "selective", "full"))
    assert none < selective < 1.1 * none
    assert 1.25 * none < full < 4 / 3 * none  # a forward more, without head, loss and accumulation


def test_small_matrices_are_slow() -> None:
    """The memory between products weighs more where they are narrow, so one MFU for all sizes cannot be right."""
    narrow, wide = llama(16, 1024, 8, 3584), LLAMA_70B
    told = []
    for sizes in (narrow, wide):
        work = Workload(sizes, 2048, 64)
        told.append(StepModel(work, H100).mfu(step(Layout(), workload=work).total_s, 1))
    assert told[0] < 0.8 * told[1]


def test_strong_scaling_falls() -> None:
    """The same batch over more devices: gradients take as long, compute does not."""
    told = [StepModel(WORK, H100).mfu(step(Layout(dp_shard=n, zero_stage=1)).total_s, n) for n in (8, 64, 256)]
    assert told[0] > told[1] > told[2]
    assert told[2] < 0.8 * told[0]


def test_phantoms_take_time() -> None:
    """3 micro-batches over 4 stages run as 4."""
    work = replace(WORK, global_batch_size=3)
    filled = replace(WORK, global_batch_size=4)
    layout = Layout(pp=4)
    assert step(layout, workload=work).total_s == pytest.approx(step(layout, workload=filled).total_s)
    assert StepModel(work, H100, implementation=MEGATRON).step(layout).num_micro_batches == 3


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=4, dp_shard=4),
        Layout(tp=8, pp=8, pp_schedule="interleaved", pp_chunks=2),
        Layout(tp=2, pp=4, dp_shard=4, pp_schedule="zero_bubble", pp_chunks=2),
    ],
)
def test_the_closed_form_is_near_the_schedule_played_out(layout: Layout) -> None:
    """Stages are not equal: the ends have embedding and head."""
    model = StepModel(WORK, H100)
    inner = model.inner(layout)
    played = simulate(
        model.pieces(layout),
        pp=layout.pp,
        num_micro_batches=inner.num_micro_batches,
        schedule=layout.pp_schedule,
        p2p_s=model.passing_of_one_s(layout),
    )
    assert inner.total_s == pytest.approx(played.total_s, rel=0.06)


def test_nothing_is_faster_than_its_lower_bound() -> None:
    model = StepModel(WORK, H100)
    for layout in (Layout(dp_shard=64), Layout(tp=4, dp_shard=8, dp_replicate=2, zero_stage=2), Layout(pp=4, dp_shard=16)):
        assert model.inner(layout).total_s < model.step(layout).total_s


def test_what_surefoot_does_not_hide() -> None:
    """Collectives inside its layers, and reductions of its pipelines; another program's are hidden as calibrated."""
    layout = Layout(tp=8, dp_shard=8)
    own, other = (StepModel(WORK, H100, implementation=program).step(layout).tensor_s for program in (SUREFOOT, MEGATRON))
    assert other == pytest.approx(own * (1 - DEFAULT.hidden_tensor))
    measured = replace(DEFAULT, num_rows=6)
    assert step(layout, calibration=measured).tensor_s == pytest.approx(other)
    pipelined = Layout(pp=4, dp_shard=16, zero_stage=1)
    own_data, other_data = (StepModel(WORK, H100, implementation=program).step(pipelined).data_s for program in (SUREFOOT, MEGATRON))
    assert other_data < own_data


def test_hidden_traffic_needs_compute_to_hide_behind() -> None:
    """One short micro-batch hides little however willing the program is."""
    layout, willing = Layout(dp_shard=256, zero_stage=1), replace(DEFAULT, hidden_data=0.99)
    short = Workload(LLAMA_8B, 512, 256)
    told = StepModel(short, H100, willing).step(layout)
    assert told.data_s > 0.5 * told.traffic["dp_shard"].seconds


def test_experts_cost_their_exchange_and_only_active_products() -> None:
    sizes = replace(LLAMA_8B, d_ff=1792, num_experts=64, experts_per_token=8)
    work = Workload(sizes, 4096, 256)
    without, with_ = (step(Layout(dp_shard=64, ep=ep), workload=work) for ep in (1, 64))
    assert with_.expert_s > 0
    assert without.expert_s == 0
    assert with_.traffic["dp_shard"].num_bytes < 0.5 * without.traffic["dp_shard"].num_bytes


def test_a_dtype_that_there_is_no_peak_of_is_refused() -> None:
    with pytest.raises(ConfigError, match="no peak of bf16"):
        StepModel(WORK, accelerator("v100")).step(Layout())
