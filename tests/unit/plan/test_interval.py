from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.plan.failures.interval import (
    Measurements,
    availability_s,
    choose_interval,
    daly_s,
    differs_enough,
    estimated_mtbf_s,
    exact_share,
    kept_share,
    mtbf_s,
    young_s,
)

HOUR_S = 3600.0


@pytest.mark.parametrize(("num_nodes", "hours"), [(2048, 1.803), (16_384, 0.2254)])
def test_the_projection_of_a_research_cluster(num_nodes: int, hours: float) -> None:
    """arXiv 2410.21680: 6.5e-3 failures per node and day; published as 1.8 h and 0.23 h."""
    assert mtbf_s(6.5e-3, num_nodes=num_nodes) / HOUR_S == pytest.approx(hours, rel=1e-3)


@pytest.mark.parametrize(("stall_s", "restart_s", "share"), [(5.0, 300.0, 0.944), (20.0, 300.0, 0.916), (20.0, 600.0, 0.890)])
def test_the_share_that_a_large_run_kept(stall_s: float, restart_s: float, share: float) -> None:
    """Llama 3: 419 unexpected interruptions in 54 days are one in 3.09 h; more than 90 % of the time was effective (arXiv 2407.21783)."""
    mean_s = 3.09 * HOUR_S
    assert kept_share(young_s(stall_s, mean_s), stall_s=stall_s, mtbf_s=mean_s, restart_s=restart_s) == pytest.approx(share, abs=1e-3)


def test_young_and_daly() -> None:
    assert young_s(5.0, 11_124.0) == pytest.approx(333.5, abs=0.1)
    assert daly_s(5.0, 11_124.0) == pytest.approx(young_s(5.0, 11_124.0) - 5.0, rel=0.01)  # first order, where saves are cheap
    assert daly_s(60.0, 3600.0) == pytest.approx(657.3 * (1 + math.sqrt(60 / 7200) / 3 + 60 / 64_800) - 60, abs=0.1)
    assert daly_s(300.0, 100.0) == 100.0


@given(stall_s=st.floats(1e-3, 100.0), mean_s=st.floats(1e3, 1e7))
def test_no_interval_nearby_keeps_more(stall_s: float, mean_s: float) -> None:
    best_s = young_s(stall_s, mean_s)
    best = kept_share(best_s, stall_s=stall_s, mtbf_s=mean_s, restart_s=0.0)
    for factor in (0.5, 2.0):
        assert best >= kept_share(best_s * factor, stall_s=stall_s, mtbf_s=mean_s, restart_s=0.0)


def test_the_prior_counts_as_one_failure() -> None:
    assert estimated_mtbf_s(0, 0.0, prior_s=1000.0) == 1000.0
    assert estimated_mtbf_s(0, 5000.0, prior_s=1000.0) == 6000.0
    assert estimated_mtbf_s(99, 9000.0, prior_s=1000.0) == 100.0


def measured(*, step_s: float = 0.5, stall_s: float = 1.0, write_s: float = 2.0, num_failures: int = 9) -> Measurements:
    return Measurements(step_s=step_s, stall_s=stall_s, write_s=write_s, num_failures=num_failures, observed_s=10 * HOUR_S)


def test_what_is_cheap_and_often_needed_is_done_often() -> None:
    chosen = choose_interval(measured(), prior_mtbf_s=0.0, max_s=HOUR_S)
    assert chosen.mtbf_s == HOUR_S
    assert chosen.num_steps == math.ceil(daly_s(1.0, HOUR_S) / 0.5)
    assert "a save blocks 1 s" in chosen.reason


def test_a_save_is_over_before_the_next_begins() -> None:
    chosen = choose_interval(measured(write_s=500.0), prior_mtbf_s=0.0, max_s=HOUR_S)
    assert (chosen.num_steps, "takes 500 s" in chosen.reason) == (1000, True)


def test_the_work_at_stake_is_bounded() -> None:
    chosen = choose_interval(measured(num_failures=0), prior_mtbf_s=1e9, max_s=HOUR_S)
    assert (chosen.seconds, "3600 s of work" in chosen.reason) == (HOUR_S, True)


def test_a_write_that_takes_longer_than_the_bound_is_waited_for() -> None:
    assert choose_interval(measured(write_s=4000.0, num_failures=0), prior_mtbf_s=1e9, max_s=HOUR_S).seconds == 4000.0


@given(
    step_s=st.floats(1e-4, 1e3),
    stall_s=st.floats(0.0, 1e3),
    write_s=st.floats(0.0, 1e4),
    num_failures=st.integers(0, 1000),
    max_s=st.floats(1.0, 1e5),
)
def test_the_bounds_hold(step_s: float, stall_s: float, write_s: float, num_failures: int, max_s: float) -> None:
    given_ = measured(step_s=step_s, stall_s=stall_s, write_s=write_s, num_failures=num_failures)
    chosen = choose_interval(given_, prior_mtbf_s=1e6, max_s=max_s)
    assert chosen.num_steps >= 1
    assert write_s <= chosen.seconds <= max(write_s, max_s)


@pytest.mark.parametrize(("new", "old", "enough"), [(500, 500, False), (545, 500, False), (560, 500, True), (100, 500, True)])
def test_small_changes_are_kept_to_oneself(new: int, old: int, enough: bool) -> None:
    assert differs_enough(new, old) is enough


@pytest.mark.parametrize(("stall_s", "interval_s", "lost"), [(1.0, 604.0, 0.0033), (10.0, 1910.0, 0.0105), (60.0, 4679.0, 0.0256)])
def test_what_saving_costs_a_thousand_devices(stall_s: float, interval_s: float, lost: float) -> None:
    """One failure in 50,677 device-hours, as Llama 3 saw them: 50.7 h between two."""
    mean_s = 50_677 * HOUR_S / 1000
    best_s = young_s(stall_s, mean_s)
    assert best_s == pytest.approx(interval_s, rel=1e-3)
    assert stall_s / best_s + best_s / 2 / mean_s == pytest.approx(lost, abs=5e-5)
    assert 900.0 / mean_s == pytest.approx(0.0049, abs=5e-5)  # a quarter of an hour of restart


def test_what_it_costs_sixteen_thousand() -> None:
    mean_s = 50_677 * HOUR_S / 16_384
    best_s = young_s(10.0, mean_s)
    assert best_s == pytest.approx(472.0, rel=1e-3)
    assert 10.0 / best_s + (best_s / 2 + 900.0) / mean_s == pytest.approx(0.123, abs=5e-4)


@given(stall_s=st.floats(0.1, 100.0), mean_s=st.floats(1e3, 1e7), restart_s=st.floats(0.0, 2000.0))
def test_availability_is_greatest_at_its_optimum(stall_s: float, mean_s: float, restart_s: float) -> None:
    def available(cycle_s: float) -> float:
        return (1.0 - stall_s / cycle_s) * mean_s / (mean_s + restart_s + cycle_s / 2.0)

    best_s = availability_s(stall_s, mean_s, restart_s=restart_s)
    assert available(best_s) >= max(available(best_s * 0.99), available(best_s * 1.01))
    assert availability_s(stall_s, mean_s, restart_s=0.0) >= young_s(stall_s, mean_s)


def test_first_order_and_exact_share_agree_where_failures_are_rare() -> None:
    rare = {"stall_s": 1.0, "mtbf_s": 2e5, "restart_s": 300.0}
    assert exact_share(600.0, **rare) == pytest.approx(kept_share(600.0, **rare), abs=1e-5)
    often = {"stall_s": 1.0, "mtbf_s": 2000.0, "restart_s": 900.0}
    assert exact_share(600.0, **often) > kept_share(600.0, **often) + 0.03  # who waits loses no work to a second failure
