from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import product

import pytest

from surefoot.core.errors import PlanInfeasible
from surefoot.core.layouts import refusals
from surefoot.core.sections import DataSection, ModelSection, ParallelSection, RunConfig, TrainSection
from surefoot.plan.hardware import accelerator
from surefoot.plan.layouts.judge import judge
from surefoot.plan.layouts.legality import Limits
from surefoot.plan.layouts.search import RECOMPUTES, Ranked, divisors, rank
from surefoot.plan.layouts.throughput import StepModel
from surefoot.plan.records import BF16_MASTERS, Layout, Workload
from tests.unit.plan.models import LLAMA_8B, LLAMA_70B, LLAMA_405B, llama

H100 = accelerator("h100")
WORK = Workload(LLAMA_8B, 4096, 128, BF16_MASTERS)
FEW = Limits(max_chunks=2, max_micro_batch_size=2)


def every_layout(num_devices: int) -> list[Layout]:
    """By counting out: each axis, stage of ZeRO, schedule, recomputation and micro-batch of the search, nothing left out early."""
    found = []
    for tp, cp, pp in product(divisors(num_devices), divisors(num_devices), divisors(num_devices)):
        if num_devices % (tp * cp * pp):
            continue
        for shard in divisors(num_devices // (tp * cp * pp)):
            for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2)) if pp > 1 else (("1f1b", 1),):
                for stage in ((1, 3) if pp > 1 else (1, 2, 3)) if shard * cp > 1 else (3,):
                    for recompute, size in product(RECOMPUTES, (1, 2)):
                        found.append(
                            Layout(tp, pp, cp, 1, shard, num_devices // (tp * cp * pp * shard), stage, schedule, chunks, recompute, size)  # type: ignore[arg-type]
                        )
    return found


def can_be_run(layout: Layout) -> bool:
    enough = layout.pp * layout.pp_chunks <= WORK.sizes.num_layers
    return enough and judge(WORK, H100, layout, limits=FEW, play=False).legal


def by_hand(num_devices: int, *, num_ranked: int, per_axes: int) -> tuple[int, list[Layout]]:
    """How many can be run, and the fastest of them."""
    model = StepModel(WORK, H100)
    legal = [layout for layout in every_layout(num_devices) if layout.micro_batch_size * layout.data_ranks <= WORK.global_batch_size]
    legal = [layout for layout in legal if can_be_run(layout)]
    best: list[Layout] = []
    of_axes: dict[tuple[int, ...], int] = {}
    for layout in sorted(legal, key=lambda one: model.step(one).total_s):
        axes = (layout.tp, layout.cp, layout.pp)
        if of_axes.get(axes, 0) < per_axes and len(best) < num_ranked:
            of_axes[axes] = of_axes.get(axes, 0) + 1
            best.append(layout)
    return len(legal), best


def closed(found: Ranked) -> list[float]:
    """Times by the closed form, before schedules are played out, the fastest first."""
    model = StepModel(WORK, H100)
    return sorted(model.step(judged.layout).total_s for judged in found.layouts)


def test_the_search_is_exhaustive_at_64_devices() -> None:
    """Beside a count of every layout, each judged by itself."""
    number, best = by_hand(64, num_ranked=12, per_axes=2)
    pruned = rank(WORK, H100, 64, limits=FEW, num_ranked=12)
    whole = rank(WORK, H100, 64, limits=FEW, num_ranked=12, prune=False)
    print(f"{len(every_layout(64))} layouts of 64 devices, {number} can be run; the search took {pruned.counts.ranked} of them to the end")
    assert whole.counts.ranked == number > 500
    assert pruned.counts.ranked < number / 3
    model = StepModel(WORK, H100)
    assert closed(pruned) == closed(whole) == pytest.approx(sorted(model.step(layout).total_s for layout in best))
    assert [judged.layout for judged in pruned.layouts] == [judged.layout for judged in whole.layouts]


def test_every_layout_is_ranked_slower_or_rejected() -> None:
    counts = rank(WORK, H100, 64, limits=FEW).counts
    assert counts.considered == counts.ranked + counts.slower + sum(counts.rejected.values())


@pytest.fixture(scope="module")
def of_70b() -> Ranked:
    return rank(Workload(LLAMA_70B, 8192, 512), H100, 512)


def test_rejections_have_reasons_of_each_kind(of_70b: Ranked) -> None:
    found = of_70b
    assert {"node", "memory", "bubble", "pp", "cp"} <= found.counts.rejected.keys()
    by_kind = {one.kind: one.reason for one in found.rejected}
    assert "needs" in by_kind["memory"]
    assert "h100 has 79.6 GiB" in by_kind["memory"]
    assert "it takes" in by_kind["bubble"]
    assert "leaves the node of 8" in by_kind["node"]
    assert len(found.rejected) <= 4 * len(by_kind)


def test_ranked_layouts_fit_and_come_fastest_first(of_70b: Ranked) -> None:
    found = of_70b
    assert len(found.layouts) == 20
    assert all(judged.legal and judged.memory.total < H100.memory_bytes for judged in found.layouts)
    times = [judged.step_s for judged in found.layouts]
    assert len(json.dumps(found.as_dict(), allow_nan=False)) < 200_000
    assert times == sorted(times)
    assert 0.3 < found.best.mfu < 0.5
    assert found.best.tokens_per_s == pytest.approx(512 * 8192 / found.best.step_s)


def test_405b_on_16384_devices_answers_at_once() -> None:
    """The bound is against a hang: 0.2 to 0.6 s on one core."""
    began = time.process_time()
    found = rank(Workload(LLAMA_405B, 8192, 2048), H100, 16_384)
    assert time.process_time() - began < 10.0
    assert found.counts.considered > 100_000
    best = found.best.layout
    assert (best.tp, best.num_devices) == (8, 16_384)
    assert best.pp >= 8


def test_a_larger_bubble_lets_more_layouts_in() -> None:
    strict, lax = (rank(WORK, H100, 32, max_bubble=share, limits=FEW).counts for share in (0.05, 0.4))
    assert strict.rejected["bubble"] > lax.rejected.get("bubble", 0)


def test_nothing_fits_is_told_with_the_commonest_reason() -> None:
    found = rank(Workload(LLAMA_405B, 8192, 64), H100, 8)
    assert not found.layouts
    with pytest.raises(PlanInfeasible, match=r"none of \d+ layouts can be run"):
        _ = found.best


def test_experts_are_cut_over_data_ranks() -> None:
    sizes = replace(llama(16, 2048, 16, 1024), num_experts=64, experts_per_token=4)
    found = rank(Workload(sizes, 4096, 256), H100, 16, limits=FEW)
    assert any(judged.layout.ep > 1 for judged in found.layouts)
    assert all(judged.layout.data_ranks % judged.layout.ep == 0 for judged in found.layouts)
    assert not any(judged.trainable for judged in found.layouts)
    assert "ep is planned" in next(judged for judged in found.layouts if judged.layout.ep > 1).untrainable


def test_what_is_called_trainable_is_not_refused_by_training() -> None:
    """Beside core.layouts, which `train` asks; the control is a layout that it refuses."""
    sizes = llama(8, 512, 8, 1536, vocab_size=32_000)
    model = ModelSection(num_layers=8, d_model=512, num_heads=8, num_kv_heads=8, d_ff=1536, vocab_size=32_000)

    def config(layout: Layout) -> RunConfig:
        names = ("tp", "cp", "pp", "dp_shard", "dp_replicate", "zero_stage", "pp_schedule", "pp_chunks", "recompute")
        parallel = ParallelSection(**{name: getattr(layout, name) for name in names})
        train = TrainSection(global_batch_size=64, micro_batch_size=layout.micro_batch_size)
        return RunConfig(model=model, data=DataSection(seq_len=1024), train=train, parallel=parallel)

    found = rank(Workload(sizes, 1024, 64), H100, 16, num_ranked=60, max_bubble=0.5)
    assert len({judged.layout.pp_schedule for judged in found.layouts}) > 1
    for judged in found.layouts:
        assert judged.trainable
        assert not refusals(config(judged.layout)), judged.layout
    assert refusals(config(Layout(tp=16)))
