"""The simulator against closed forms, by one property at a time, and against what was published."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError
from surefoot.plan.failures.interval import daly_s, exact_share, young_s
from surefoot.plan.failures.published_points import POINTS, Outcome, outcome_of
from surefoot.plan.failures.scenario import GRADES, Grade, Lemons, Scenario, Tier, best_interval_s, first_order_share, interval_of
from surefoot.plan.failures.simulation import Simulated, simulate

DAY_S = 86_400.0
ONE_TIER = (Tier("shared"),)
RATE = 3.79e-3


def restarts(seconds: float) -> dict[Grade, float]:
    return dict.fromkeys(GRADES, seconds)


PLAIN = Scenario(2048, 54 * DAY_S, RATE, stall_s=20.0, tiers=ONE_TIER, restart_s=restarts(300.0))


def share_of(found: Simulated, name: str) -> float:
    return found.classes[name].value


@pytest.mark.parametrize(
    ("num_nodes", "stall_s", "restart_s", "interval_s"),
    [(2048, 20.0, 300.0, None), (2048, 60.0, 900.0, 300.0), (12_500, 5.0, 400.0, 120.0), (125, 1.0, 900.0, None)],
)
def test_one_tier_is_the_closed_form(num_nodes: int, stall_s: float, restart_s: float, interval_s: float | None) -> None:
    scenario = replace(PLAIN, num_nodes=num_nodes, stall_s=stall_s, restart_s=restarts(restart_s), interval_s=interval_s)
    found = simulate(scenario)
    exact = exact_share(found.interval_s, stall_s=stall_s, mtbf_s=scenario.mtbf_s, restart_s=restart_s)
    half_width = (found.mean_band[1] - found.mean_band[0]) / 2
    assert abs(found.goodput.value - exact) < 2 * half_width + 1e-4
    assert not abs(found.goodput.value - exact + 0.01) < 2 * half_width + 1e-4  # a point off would be seen
    assert first_order_share(scenario) == pytest.approx(exact, abs=0.02)


def test_on_productive_time_only_what_runs_fails() -> None:
    often = replace(PLAIN, num_nodes=12_500, total_s=30 * DAY_S, stall_s=0.01, interval_s=10.0, restart_s=restarts(600.0))
    wall, productive = simulate(often), simulate(replace(often, clock="productive"))
    mean_s = often.mtbf_s
    assert wall.goodput.value == pytest.approx(1 - 600 / mean_s, abs=0.005)
    assert productive.goodput.value == pytest.approx(mean_s / (mean_s + 600), abs=0.005)


@settings(max_examples=20, deadline=None)
@given(
    num_nodes=st.integers(1, 3000),
    days=st.floats(0.1, 20.0),
    stall_s=st.floats(0.0, 100.0),
    restart_s=st.floats(0.0, 5e4),
    num_spares=st.one_of(st.none(), st.integers(0, 3)),
    every=st.integers(1, 5),
    clock=st.sampled_from(["wall", "productive"]),
    share=st.floats(0.0, 0.5),
)
def test_classes_partition_the_time(
    num_nodes: int, days: float, stall_s: float, restart_s: float, num_spares: int | None, every: int, clock: str, share: float
) -> None:
    scenario = Scenario(
        num_nodes,
        days * DAY_S,
        RATE,
        stall_s=stall_s,
        interval_s=max(50.0, stall_s),
        tiers=(Tier("memory"), Tier("shared", every=every, write_s=30.0, restore_s=60.0)),
        detect_s=30.0,
        restart_s=restarts(restart_s),
        num_spares=num_spares,
        lemons=Lemons(share, 10.0, 2 if share else 0),
        clock=clock,  # type: ignore[arg-type]  # parametrize knows no literals
    )
    found = simulate(scenario)
    assert sum(part.value for part in found.classes.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(part.band[0] >= -1e-9 for part in found.classes.values())


def test_half_a_node_fails_half_as_often() -> None:
    often = replace(PLAIN, num_nodes=1, failures_per_node_day=1.0)
    whole, half = (simulate(replace(often, num_nodes=nodes)).num_failures.value for nodes in (1, 0.5))
    assert whole / half == pytest.approx(2.0, rel=0.05)
    of_lemons = simulate(replace(often, num_nodes=0.5, lemons=Lemons(0.5, 3.0))).num_failures.value
    assert of_lemons == pytest.approx(half, rel=0.1)  # the only host may be a lemon


def test_the_same_seed_draws_the_same() -> None:
    assert simulate(PLAIN, seed=3) == simulate(PLAIN, seed=3)
    assert simulate(PLAIN, seed=3) != simulate(PLAIN, seed=4)


def test_no_interval_nearby_keeps_more() -> None:
    tiers = (Tier("memory"), Tier("shared", every=4))
    scenario = replace(PLAIN, tiers=tiers, stall_s=10.0)
    best_s = best_interval_s(scenario)
    assert best_s < daly_s(10.0, scenario.mtbf_s)  # the slow tier lags by several intervals
    assert best_interval_s(replace(scenario, tiers=ONE_TIER)) == young_s(10.0, scenario.mtbf_s)
    best = simulate(scenario).goodput.value
    for factor in (0.4, 2.5):
        assert simulate(replace(scenario, interval_s=factor * best_s)).goodput.value < best - 0.005


def only(grade: str) -> dict[Grade, float]:
    return {one: float(one == grade) for one in GRADES}


@pytest.mark.parametrize(("grade", "source"), [("process", "memory"), ("node", "peer"), ("large_scale", "shared")])
def test_each_grade_goes_back_to_the_newest_tier_that_it_leaves(grade: str, source: str) -> None:
    """The tiers lag by 1, 4 and 16 intervals of 100 s: half of that is lost with each failure."""
    tiers = (Tier("memory"), Tier("peer", every=4), Tier("shared", every=16))
    scenario = replace(PLAIN, num_nodes=500, stall_s=0.001, interval_s=100.0, tiers=tiers, restart_s=restarts(1.0), shares=only(grade))
    found = simulate(scenario)
    lost_s = share_of(found, "lost_work") * scenario.total_s / found.num_failures.value
    lag = next(tier.every for tier in tiers if tier.kind == source)
    assert lost_s == pytest.approx(lag * 100.0 / 2, rel=0.05)


def test_where_no_tier_survives_all_is_lost() -> None:
    kept = {tiers: simulate(replace(PLAIN, num_nodes=50, tiers=(Tier(tiers),), shares=only("node"))) for tiers in ("memory", "shared")}
    assert kept["memory"].goodput.value < 0.3 < 0.95 < kept["shared"].goodput.value


def test_a_copy_that_is_still_being_written_is_not_there_yet() -> None:
    slow = replace(PLAIN, num_nodes=200, interval_s=600.0, tiers=(Tier("shared", write_s=500.0),))
    more = share_of(simulate(slow), "lost_work") - share_of(simulate(replace(slow, tiers=ONE_TIER)), "lost_work")
    assert more == pytest.approx(500.0 / slow.mtbf_s, rel=0.05)


def test_no_save_begins_before_the_last_one_is_written() -> None:
    asked = replace(PLAIN, interval_s=10.0, tiers=(Tier("memory"), Tier("shared", every=2, write_s=600.0)))
    assert interval_of(asked) == 600.0 / 2 - asked.stall_s
    assert interval_of(replace(asked, tiers=ONE_TIER)) == 10.0


def test_saves_that_cost_nothing_still_stand_between_steps() -> None:
    found = simulate(replace(PLAIN, stall_s=0.0))
    assert found.interval_s == 1.0
    assert share_of(found, "saving") == 0.0


def test_what_the_luck_of_one_run_needs_is_drawn_until_it_is_known() -> None:
    lucky = simulate(replace(PLAIN, num_nodes=125, total_s=30 * DAY_S, num_spares=1))
    steady = simulate(PLAIN)
    assert lucky.num_runs > steady.num_runs
    assert steady.edge_error <= 0.0025


def test_times_of_a_restart_are_told_apart() -> None:
    scenario = replace(
        PLAIN,
        detect_s=30.0,
        restart_s={"process": 10.0, "node": 200.0, "large_scale": 2000.0},
        tiers=(Tier("shared", restore_s=40.0),),
        shares={"process": 0.5, "node": 0.25, "large_scale": 0.25},
    )
    found = simulate(scenario)
    per_failure_s = scenario.total_s / found.num_failures.value
    assert share_of(found, "detecting") * per_failure_s == pytest.approx(30.0, rel=0.01)
    assert share_of(found, "restoring") * per_failure_s == pytest.approx(40.0, rel=0.01)
    assert share_of(found, "restarting") * per_failure_s == pytest.approx(555.0, rel=0.02)


def test_spares_end_the_waiting() -> None:
    waits = []
    for num_spares in (0, 1, 3, 8, None):
        found = simulate(replace(PLAIN, num_nodes=125, total_s=30 * DAY_S, num_spares=num_spares))
        waits.append(share_of(found, "waiting_for_node"))
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 0.2
    assert waits[3] < 1e-4
    assert waits[4] == 0.0


def test_without_a_spare_the_job_waits_for_each_repair() -> None:
    found = simulate(replace(PLAIN, num_nodes=20, num_spares=0, repair_s=3600.0, shares=only("node")))
    assert share_of(found, "waiting_for_node") * PLAIN.total_s / found.num_failures.value == pytest.approx(3600.0, rel=0.03)


def test_lemons_keep_the_mean_until_they_are_put_out() -> None:
    plain = simulate(PLAIN).num_failures.value
    kept = simulate(replace(PLAIN, lemons=Lemons(0.02, 20.0))).num_failures.value
    evicted = simulate(replace(PLAIN, lemons=Lemons(0.02, 20.0, evict_after=2))).num_failures.value
    assert kept == pytest.approx(plain, rel=0.03)
    assert evicted < 0.93 * plain


def test_bands_are_of_single_runs_and_of_the_mean() -> None:
    found = simulate(PLAIN)
    assert found.goodput.band[0] < found.mean_band[0] < found.goodput.value < found.mean_band[1] < found.goodput.band[1]
    assert found.goodput.band[1] - found.goodput.band[0] < 0.05


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"total_s": 1e12}, "simulate fewer days"),
        ({"failures_per_node_day": 0.0}, "--failures-per-node-day"),
        ({"stall_s": -1.0}, "--stall-s"),
        ({"shares": {"process": 0.5, "node": 0.6, "large_scale": 0.0}}, "sum to 1"),
        ({"tiers": ()}, "no tier"),
        ({"lemons": Lemons(1.0)}, "--lemon-share"),
        ({"interval_s": float("nan")}, "--interval-s"),
        ({"lemons": Lemons(0.5, 0.0)}, "--lemon-factor"),
        ({"num_nodes": 0}, "--gpus"),
        ({"num_nodes": 1e12, "failures_per_node_day": 1e-11}, "--gpus"),
        ({"failures_per_node_day": 1e-300}, "--failures-per-node-day"),
        ({"num_spares": 10**12}, "--spares"),
        ({"detect_s": 1e308, "restart_s": restarts(1e308)}, "--detect-s"),
        ({"tiers": (Tier("shared", write_s=1e308),)}, "write_s"),
        ({"lemons": Lemons(0.5, 10.0, 10**12)}, "--evict-after"),
        ({"lemons": Lemons(0.0, 10.0, 2)}, "--lemon-share"),
        ({"lemons": Lemons(0.5, 1e308)}, "--lemon-factor"),
    ],
)
def test_what_cannot_be_simulated_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(replace(PLAIN, **change))  # type: ignore[arg-type]  # wrong on purpose


@cache
def published(name: str) -> Outcome:
    return outcome_of(name)


@pytest.mark.parametrize("name", POINTS)
def test_published_points(name: str) -> None:
    outcome = published(name)
    unexplained = {"rsc-1024-gpus", "opt-175b"}
    unjudged = {"gemini", "palm", "dlrover-glm-65b"}
    assert outcome.explained is (None if name in unjudged else name not in unexplained)
    assert outcome.source
    if outcome.band:
        assert outcome.quantity != "goodput" or outcome.band[1] - outcome.band[0] < 0.05


@pytest.mark.parametrize(
    ("name", "figure", "tolerance"),
    [
        ("rsc-16384-gpus", 1.803, 0.01),
        ("rsc-131072-gpus", 0.225, 0.01),
        ("rsc-1024-gpus", 28.8, 0.01),
        ("ft-hsdp", 0.436, 0.02),
    ],
)
def test_figures_of_published_points(name: str, figure: float, tolerance: float) -> None:
    assert published(name).computed == pytest.approx(figure, rel=tolerance)


def test_what_bloom_lost_with_each_failure() -> None:
    outcome = published("bloom")
    assert outcome.computed == pytest.approx(1.5, rel=0.02)
    assert outcome.more["lost_work"] == pytest.approx([0.009, 0.018], abs=0.0005)


def test_what_llama_3_leaves_room_for() -> None:
    variants = published("llama-3").more["variants"]
    assert [round(one["goodput"], 3) for one in variants] == pytest.approx([0.944, 0.890, 0.890], abs=0.003)


def test_what_byterobust_leaves_room_for() -> None:
    assert published("byterobust").more["lost_minutes_per_failure"] == pytest.approx([5.54, 9.50], abs=0.01)


def test_an_unknown_point_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="llama-3"):
        outcome_of("llama-4")
