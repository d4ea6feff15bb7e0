from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from surefoot.coordinate.beats import Beat
from surefoot.coordinate.phase_limits import Learned, PhaseLimits, configured_limits, gaps_that_ended, limits_now, worst_case_line
from surefoot.core.records import Phase
from surefoot.core.sections import LaunchSection

LAUNCH = LaunchSection()
BEAT = Beat(0, 100, 1, Phase.STEP, step=7, micro_step=0, collective_seq=0, mono_s=0.0, restored=True, num_beats=5, warm=True)


def learned(*gaps_s: float, phase: Phase = Phase.STEP) -> Learned:
    found = Learned("here")
    for gap_s in gaps_s:
        found = found.note(phase, gap_s)
    return found


def test_every_default_is_finite() -> None:
    assert all(0.0 < limit_s < math.inf for limit_s in asdict(configured_limits(LAUNCH)).values())
    assert all(configured_limits(LAUNCH).of(phase, warm=warm) < math.inf for phase in Phase for warm in (False, True))


def test_a_few_gaps_teach_nothing() -> None:
    assert limits_now(LAUNCH, learned(*[1.0] * 19)) == configured_limits(LAUNCH)


def test_short_gaps_lower_a_limit_to_its_floor() -> None:
    assert limits_now(LAUNCH, learned(*[0.3] * 20)).step_s == LAUNCH.floor_limit_s


def test_long_gaps_raise_a_limit_above_what_was_configured() -> None:
    limits = limits_now(LAUNCH, learned(*[30.0] * 20))
    assert limits.step_s == 240.0 > LAUNCH.step_limit_s
    assert limits.data_s == LAUNCH.data_limit_s
    assert limits.of(Phase.STEP, warm=False) == LAUNCH.first_step_limit_s


def test_one_gap_of_many_raises_nothing() -> None:
    assert limits_now(LAUNCH, learned(*[3.0] * 200, 500.0)).step_s == 24.0


def test_old_gaps_are_forgotten() -> None:
    assert limits_now(LAUNCH, learned(*[50.0] * 300, *[4.0] * 300)).step_s == 32.0


def test_data_is_learned_and_what_is_declared_long_is_not() -> None:
    assert limits_now(LAUNCH, learned(*[5.0] * 30, phase=Phase.DATA)).data_s == 40.0
    assert learned(1.0, phase=Phase.SAVE) == Learned("here")


def test_fixed_limits_stay() -> None:
    assert limits_now(replace(LAUNCH, limits="fixed"), learned(*[30.0] * 20)) == configured_limits(LAUNCH)


def test_another_topology_starts_anew() -> None:
    found = learned(*[1.0] * 20)
    assert found.for_topology("here") is found
    assert found.for_topology("there") == Learned("there")


def test_what_is_kept_reads_back() -> None:
    found = learned(1.25, 2.5)
    assert Learned.from_json(found.as_json()) == found


@pytest.mark.parametrize(
    "record", [None, [], {}, {"topology": "x", "gaps_s": {"save": [1.0]}}, {"topology": "x", "gaps_s": {"step": [-1.0]}}, {"gaps_s": 3}]
)
def test_what_does_not_read_teaches_nothing(record: object) -> None:
    assert Learned.from_json(record) == Learned()


def test_a_gap_counts_when_another_beat_ended_it() -> None:
    moved = replace(BEAT, num_beats=6)
    assert gaps_that_ended([(BEAT, 1.5)], {0: moved}) == [(Phase.STEP, 1.5)]
    assert gaps_that_ended([(BEAT, 1.5)], {0: BEAT}) == []
    assert gaps_that_ended([(replace(BEAT, warm=False), 1.5)], {0: moved}) == []
    assert gaps_that_ended([(BEAT, 1.5)], {0: replace(moved, pid=101)}) == []


def test_the_worst_case_names_every_limit() -> None:
    line = worst_case_line(PhaseLimits(11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0), look_s=0.2)
    assert line == (
        "worst-case detection: dead rank 0.2 s, stopped rank 1.4 s, hung step 15.4 s, hung first step 15.4 s, hung data 13.4 s, "
        "hung evaluation 16.4 s, hung save 17.4 s, hung start or restore 12.4 s, hung end 18.4 s"
    )
