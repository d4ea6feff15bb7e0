"""Failures, checkpoints, retention, spares and money of a run, against figures worked out by hand or published."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.checkpoint.retention import retire
from surefoot.core import strict_json
from surefoot.core.records import CheckpointRef
from surefoot.plan.failures.answer import answer_of
from surefoot.plan.failures.checkpoint_sizes import save_times, saved_bytes
from surefoot.plan.failures.rates import LLAMA_3, LLAMA_3_CAUSES, RSC_1, llama_3_shares, poisson_band, poisson_quantile
from surefoot.plan.failures.reasons import reasons_of
from surefoot.plan.failures.reliability import Operation, assess
from surefoot.plan.failures.retention import retention_for, rolling_checkpoints
from surefoot.plan.failures.spares import spares_for
from surefoot.plan.hardware import accelerator
from surefoot.plan.records import BF16_MASTERS, FP32

H100 = accelerator("h100")
DAY_S = 86_400.0
FLAGSHIP = Operation(
    hardware=H100, num_devices=1000, state_bytes=41.5e9 * 14, step_s=4.0, tokens_per_step=6.3e6, total_s=30 * DAY_S, stall_s=1.0
)


def test_published_rates_per_node_and_per_device() -> None:
    assert LLAMA_3.device_hours_per_failure == pytest.approx(50_677, rel=1e-4)
    assert LLAMA_3.per_node_day == pytest.approx(3.79e-3, rel=1e-3)
    assert LLAMA_3.mtbf_s(16_384) / 3600 == pytest.approx(3.09, abs=0.01)
    assert RSC_1.mtbf_s(1000) / 3600 == pytest.approx(29.5, abs=0.1)
    assert RSC_1.on_nodes_of(72) == pytest.approx(6.5e-3 * 9)


def test_causes_add_up_to_what_was_counted() -> None:
    assert sum(sum(causes.values()) for causes in LLAMA_3_CAUSES.values()) == 419
    assert sum(llama_3_shares().values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("probability", "mean", "count"), [(0.5, 0.1, 0), (0.99, 1.0, 4), (0.975, 14.2, 22), (0.025, 14.2, 7)])
def test_poisson_quantiles(probability: float, mean: float, count: int) -> None:
    assert poisson_quantile(probability, mean=mean) == count


def test_large_means_meet_the_exact_sum() -> None:
    for probability in (0.025, 0.5, 0.975, 0.99):
        mean = 401.0
        total = term = math.exp(-mean)
        count = 0
        while total < probability:
            count += 1
            term *= mean / count
            total += term
        assert abs(poisson_quantile(probability, mean=mean) - count) <= 1


def test_a_thousand_devices_for_a_month() -> None:
    found = assess(FLAGSHIP)
    assert (round(found.failures.low), round(found.failures.high)) == (14, 24)
    assert found.failures.band[0] < found.failures.low < found.failures.high < found.failures.band[1]
    assert found.interval.young_s == pytest.approx(604, abs=1)
    assert found.interval.steps == 151
    assert found.bytes.total == pytest.approx(581e9)
    assert found.bytes.per_rank == pytest.approx(0.58e9, rel=0.01)
    assert found.bytes.peak == found.bytes.rolling + found.bytes.milestones + found.bytes.in_flight
    assert found.bytes.milestones == found.retention.num_milestones * found.bytes.total
    assert 0.98 < found.goodput.value < 0.995
    assert found.goodput.band[0] < found.goodput.value < found.goodput.band[1]
    assert found.cost.run_usd == pytest.approx(2.16e6)
    assert found.cost.restart_minute_usd == pytest.approx(50.0)


def test_where_the_time_goes_adds_up() -> None:
    for operation in (FLAGSHIP, replace(FLAGSHIP, num_devices=16_384, stall_s=60.0, restart_s=3600.0)):
        goodput = assess(operation).goodput
        assert goodput.value + goodput.saving + goodput.lost_work + goodput.restarting == pytest.approx(1.0)
        assert min(goodput.saving, goodput.lost_work, goodput.restarting) > 0


def test_the_answer_has_a_reason_for_each_part() -> None:
    found = assess(FLAGSHIP)
    answer = answer_of(found)
    assert set(answer["checkpoint"]) >= {"interval_s", "interval_steps", "retention", "bytes"}
    assert set(answer["reliability"]) >= {"failures", "goodput", "cost", "spares"}
    for path in reasons_of(FLAGSHIP, found):
        part, _, name = path.partition(".")
        assert name in answer[part], path
    assert strict_json.plain(answer) == json.loads(strict_json.dumps(answer))


def test_every_part_has_a_reason_and_a_source() -> None:
    reasons = reasons_of(FLAGSHIP, assess(FLAGSHIP))
    assert set(reasons) >= {
        "checkpoint.interval_s",
        "checkpoint.retention",
        "checkpoint.bytes",
        "reliability.failures",
        "reliability.goodput",
    }
    assert all(reason.why and reason.source for reason in reasons.values())


def test_a_save_is_never_overtaken_by_the_next() -> None:
    operation = replace(FLAGSHIP, write_s=3001.0)
    slow = assess(operation)
    assert slow.interval.seconds >= 3001.0
    assert "written" in reasons_of(operation, slow)["checkpoint.interval_s"].why
    assert assess(replace(FLAGSHIP, write_s=300.0)).interval == replace(assess(FLAGSHIP).interval, write_s=300.0)


def test_a_measured_rate_replaces_the_published_range() -> None:
    measured = assess(replace(FLAGSHIP, failures_per_node_day=1e-2))
    assert measured.failures.low == measured.failures.expected == measured.failures.high == pytest.approx(37.5)
    assert measured.goodput.value < assess(FLAGSHIP).goodput.value


def test_restarts_cost_more_than_recomputing() -> None:
    """512 devices at 3 USD: a quarter of an hour is 384 USD."""
    found = assess(replace(FLAGSHIP, num_devices=512))
    assert found.cost.restart_minute_usd * 15 == pytest.approx(384.0)
    assert found.cost.failure_usd - found.cost.restart_minute_usd * 15 < 384.0


@pytest.mark.parametrize(("keep_weights", "total", "per_rank"), [(True, 980e9, 1.914e9), (False, 840e9, 1.641e9)])
def test_a_checkpoint_of_70b(keep_weights: bool, total: float, per_rank: float) -> None:
    size = saved_bytes(70e9, BF16_MASTERS, keep_weights=keep_weights)
    assert size == pytest.approx(total)
    assert size / 512 == pytest.approx(per_rank, rel=1e-3)


def test_float32_weights_are_their_own_masters() -> None:
    assert saved_bytes(1e9, FP32) == saved_bytes(1e9, FP32, keep_weights=False) == 12e9


def test_the_disk_of_a_node_is_shared_by_its_ranks() -> None:
    times = save_times(980e9, num_ranks=512, hardware=H100)
    assert times.flush_s == pytest.approx(1.53, abs=0.005)  # not the 0.19 s of one rank alone
    assert times.stage_s == pytest.approx(0.035, abs=0.001)
    assert save_times(980e9, num_ranks=512, hardware=H100, host_link=25e9).stage_s == pytest.approx(0.077, abs=0.001)
    assert save_times(980e9, num_ranks=512, hardware=H100, shared_bytes_per_s=10e9).write_s == pytest.approx(98.035, abs=0.001)
    assert save_times(980e9, num_ranks=4, hardware=H100).flush_s == pytest.approx(98.0)


def kept_by_the_run(*, interval_steps: int, keep_last: int, cover_steps: int, num_saves: int) -> list[list[int]]:
    """What retention leaves after each save: distances from the newest."""
    refs: list[CheckpointRef] = []
    after = []
    for number in range(1, num_saves + 1):
        refs.append(CheckpointRef(f"s{number}-a0", number * interval_steps, 0, None, "", 1, read_back=True))
        gone = {one.id for one in retire(refs, keep_last=keep_last, milestone_steps=0, cover_steps=cover_steps)}
        refs = [ref for ref in refs if ref.id not in gone]
        after.append([number * interval_steps - ref.step for ref in reversed(refs)])
    return after


@settings(max_examples=40, deadline=None)
@given(interval_steps=st.sampled_from([10, 150]), keep_last=st.integers(1, 4), num_covered=st.integers(0, 60))
def test_no_more_stand_on_disk_than_planned(interval_steps: int, keep_last: int, num_covered: int) -> None:
    rule = {"interval_steps": interval_steps, "keep_last": keep_last, "cover_steps": num_covered * interval_steps}
    most = max(map(len, kept_by_the_run(**rule, num_saves=3 * num_covered + 20)))
    assert most <= rolling_checkpoints(**rule) <= most + 2


def test_the_planned_settings_let_a_run_go_behind_the_fault() -> None:
    """Found 2,100 steps late, saved every 500: keep_last 3 alone reaches back 1,000."""
    plan = retention_for(2100.0, step_s=1.0, interval_steps=500, total_steps=100_000)
    assert plan.latency_steps == 2100
    kept = {"interval_steps": 500, "keep_last": plan.keep_last, "cover_steps": plan.cover_steps}
    for distances in kept_by_the_run(**kept, num_saves=60)[10:]:
        behind = [distance for distance in distances if distance >= plan.latency_steps]
        assert behind
        assert min(behind) <= plan.worst_rollback_steps
    assert max(kept_by_the_run(interval_steps=500, keep_last=3, cover_steps=0, num_saves=60)[-1]) < plan.latency_steps


def test_a_fast_detector_needs_nothing_older() -> None:
    assert retention_for(100.0, step_s=1.0, interval_steps=500, total_steps=100_000).cover_steps == 0


@pytest.mark.parametrize(("total_steps", "interval_steps"), [(60, 60), (7, 3), (1, 1)])
def test_short_runs_have_a_retention(total_steps: int, interval_steps: int) -> None:
    plan = retention_for(6 * 3600.0, step_s=0.5, interval_steps=interval_steps, total_steps=total_steps)
    assert 1 <= plan.num_rolling <= total_steps // interval_steps + 1
    assert plan.milestone_steps % interval_steps == 0


def test_spares_for_ninety_nine_per_cent() -> None:
    assert spares_for(1.0, num_nodes=1, node_share=1.0).num_nodes == 4  # P(X <= 3) = 0.981, P(X <= 4) = 0.996
    assert spares_for(0.01, num_nodes=1).num_nodes == 0
    small, large = (spares_for(0.05, num_nodes=1, repair_s=days * DAY_S).num_nodes for days in (1, 20))
    assert small < large
    assert assess(FLAGSHIP).spares.num_nodes == 3


def test_no_more_nodes_are_in_repair_than_there_are() -> None:
    rare, often = spares_for(1e-4, num_nodes=100, node_share=1.0), spares_for(50.0, num_nodes=100, node_share=1.0)
    assert rare.mean_in_repair == pytest.approx(0.01, rel=1e-3)
    assert 98.0 < often.mean_in_repair < 100.0


@pytest.mark.parametrize("rate", [1e-12, 1.0, 50.0, 1e9])
def test_any_rate_has_a_finite_answer(rate: float) -> None:
    found = assess(replace(FLAGSHIP, failures_per_node_day=rate))
    assert strict_json.loads(strict_json.dumps(answer_of(found)))
    assert 0.0 <= found.goodput.value <= 1.0
    assert 0.0 <= found.spares.mean_in_repair < FLAGSHIP.num_nodes


def test_a_part_of_a_node_is_told_as_such() -> None:
    half = replace(FLAGSHIP, num_devices=4)
    found = assess(half)
    assert found.failures.mtbf_s == pytest.approx(LLAMA_3.mtbf_s(4))
    assert "on 0.5 nodes, one in 12,669" in reasons_of(half, found)["reliability.failures"].why


def test_the_luck_of_one_run() -> None:
    low, high = poisson_band(14.2)
    assert (low, high) == (7, 22)
