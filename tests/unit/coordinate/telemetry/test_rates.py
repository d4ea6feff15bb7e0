"""Rates: counters grow, go back and wrap; a level counts when it is held; an alarm is raised once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.coordinate.telemetry.rates import AGAIN_S, NodeAlarm, RateState, growth, judge, limits_of
from surefoot.coordinate.telemetry.records import DiskSample, GpuSample, HostSample, NodeSample, PortSample
from surefoot.coordinate.telemetry.rules import RULES
from surefoot.core.errors import ConfigError


def sample(at_s: float, **parts: Any) -> NodeSample:
    return NodeSample("node-1", "2026-01-01T00:00:00Z", at_s, **{"boot_id": "b", **parts})


def run(*samples: NodeSample, limits: dict[str, float] | None = None) -> list[list[NodeAlarm]]:
    state, found = RateState(), []
    for one in samples:
        state, alarms = judge(state, one, limits=limits)
        found.append(list(alarms))
    return found


def names(found: list[list[NodeAlarm]]) -> list[list[str]]:
    return [[alarm.rule for alarm in alarms] for alarms in found]


@pytest.mark.parametrize(
    ("before", "now", "grown"),
    [(5, 5, 0), (5, 8, 3), (2**32 - 1, 4, 5), (2**64 - 2048, 2048, 4096), (1000, 3, 3), (2**31, 7, 7)],
)
def test_growth_over_resets_and_wraps(before: float, now: float, grown: float) -> None:
    assert growth(before, now) == grown


@given(before=st.integers(0, 2**64 - 1), now=st.integers(0, 2**64 - 1))
def test_growth_is_never_negative(before: int, now: int) -> None:
    assert growth(before, now) >= 0


def gpu(**figures: Any) -> dict[str, Any]:
    return {"gpus": (GpuSample("g0", **figures),)}


def test_old_errors_are_no_news_and_new_ones_are_told_once() -> None:
    found = run(*(sample(10.0 * index, **gpu(ecc_volatile_uncorrected=value)) for index, value in enumerate((7, 7, 8, 8, 9))))
    assert names(found) == [[], [], ["gpu_ecc_bad"], [], []]
    assert (found[2][0].subject, found[2][0].value, found[2][0].advice) == ("gpu g0", 1.0, "reset")


def test_the_window_forgets() -> None:
    low = {"gpu_ecc_good": 5.0}
    steps = [(0.0, 0), (10.0, 4), (5000.0, 8)]
    assert names(run(*(sample(at, **gpu(ecc_volatile_corrected=value)) for at, value in steps), limits=low)) == [[], [], []]
    close = [(0.0, 0), (10.0, 4), (20.0, 8)]
    assert names(run(*(sample(at, **gpu(ecc_volatile_corrected=value)) for at, value in close), limits=low)) == [[], [], ["gpu_ecc_good"]]


def test_a_level_counts_when_it_is_held() -> None:
    hot = [sample(at, **gpu(temperature_c=95.0)) for at in (0.0, 30.0, 60.0, 90.0)]
    assert names(run(*hot)) == [[], [], ["gpu_hot"], []]
    cooled = replace(hot[1], gpus=(GpuSample("g0", temperature_c=60.0),))
    assert names(run(hot[0], cooled, *hot[2:])) == [[], [], [], []]


def test_what_comes_and_goes_is_told_again_after_an_hour() -> None:
    steps = [(0.0, 95.0), (60.0, 95.0), (70.0, 60.0), (80.0, 95.0), (140.0, 95.0), (60.0 + AGAIN_S, 60.0), (3700.0, 95.0), (3760.0, 95.0)]
    assert [index for index, alarms in enumerate(run(*(sample(at, **gpu(temperature_c=value)) for at, value in steps))) if alarms] == [1, 7]


def test_what_is_not_said_is_neither_zero_nor_good_news() -> None:
    assert (
        names(run(sample(0.0, **gpu(ecc_volatile_uncorrected=5)), sample(1.0, **gpu()), sample(2.0, **gpu(ecc_volatile_uncorrected=5))))
        == [[]] * 3
    )
    pending = [gpu(remap_pending=True), gpu(), gpu(remap_pending=True)]
    assert names(run(*(sample(float(index), **one) for index, one in enumerate(pending)))) == [["gpu_remap_pending"], [], []]


def test_parts_that_go_missing_or_lose_lanes_are_named() -> None:
    both = {"gpus": (GpuSample("g0"), GpuSample("g1"))}
    assert names(run(sample(0.0, **both), sample(10.0, **gpu()), sample(20.0, gpus=(), unread={"gpu": "hangs"}))) == [[], ["gpu_lost"], []]
    up, down = PortSample("p/1", "ACTIVE", "LinkUp", 400.0), PortSample("p/1", "DOWN", "Polling", 400.0)
    assert names(run(sample(0.0, ports=(up,)), sample(10.0, ports=(down,)))) == [[], ["port_down"]]
    assert names(run(sample(0.0, ports=(down,)), sample(10.0, ports=(down,)))) == [[], []]  # never up: nothing is plugged in
    assert names(run(sample(0.0, ports=(up,)), sample(10.0, ports=(replace(up, rate_gbps=200.0),)))) == [[], ["port_rate"]]


def test_another_boot_begins_anew() -> None:
    found = run(sample(0.0, **gpu(ecc_volatile_uncorrected=0)), sample(5.0, boot_id="c", **gpu(ecc_volatile_uncorrected=3)))
    assert names(found) == [[], []]


def test_host_and_disk() -> None:
    host = HostSample(memory_total_bytes=100, memory_available_bytes=1, oom_kills=0)
    first = sample(0.0, host=host, disks=(DiskSample("/d", free_bytes=1, total_bytes=100, free_inodes=50, total_inodes=100),))
    later = replace(first, mono_s=60.0, host=replace(host, oom_kills=2))
    assert names(run(first, later)) == [["disk_space"], ["host_oom", "host_memory"]]


def test_every_rule_has_a_reason_and_its_name_is_a_setting() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.source and rule.title for rule in RULES)
    assert limits_of((("gpu_hot", 80.0),)) == {"gpu_hot": 80.0}
    with pytest.raises(ConfigError, match="gpu_hto"):
        limits_of((("gpu_hto", 80.0),))
