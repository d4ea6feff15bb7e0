"""Alarms: who is stopped, who is silent for too long, and what is neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from surefoot.coordinate.beats import Beat
from surefoot.coordinate.liveness import Watched, look
from surefoot.coordinate.phase_limits import PAUSE_S, STOPPED_S, PhaseLimits
from surefoot.coordinate.witness import Alarm
from surefoot.core.records import Phase

LIMITS = PhaseLimits(start_s=20.0, restore_s=20.0, data_s=15.0, first_step_s=60.0, step_s=10.0, evaluate_s=40.0, save_s=30.0, end_s=50.0)
LOOK_S = 0.25
BEAT = Beat(0, 100, 1, Phase.STEP, step=7, micro_step=0, collective_seq=0, mono_s=0.0, restored=True, num_beats=5, warm=True)


def beat(rank: int, phase: Phase = Phase.STEP, *, group: str = "", warm: bool = True) -> Beat:
    return replace(BEAT, rank=rank, phase=phase, group=group, warm=warm)


class Observer:
    """Looks at ranks that do not move, every `LOOK_S` by a clock of its own."""

    def __init__(self) -> None:
        self.now_s, self.watched = 1000.0, Watched()

    def look(self, beats: Sequence[Beat], states: Mapping[int, str] | None = None) -> Alarm | None:
        states = {beat.rank: "S" for beat in beats} if states is None else states
        alarm, self.watched = look(self.watched, beats, states, LIMITS, now_s=self.now_s)
        return alarm

    def first(self, beats: Sequence[Beat], states: Mapping[int, str] | None = None, *, within_s: float) -> tuple[Alarm | None, float]:
        """The first alarm and after how many seconds it came."""
        begun_s = self.now_s
        while self.now_s <= begun_s + within_s:
            if (alarm := self.look(beats, states)) is not None:
                return alarm, self.now_s - begun_s
            self.now_s += LOOK_S
        return None, self.now_s - begun_s


@pytest.fixture
def observer() -> Observer:
    return Observer()


def test_who_moves_raises_nothing(observer: Observer) -> None:
    for num_beats in range(200):
        assert observer.look([replace(beat(0), num_beats=num_beats, mono_s=observer.now_s)]) is None
        observer.now_s += LOOK_S


def test_a_stopped_rank_is_noticed_within_its_bound(observer: Observer) -> None:
    alarm, after_s = observer.first([beat(0), beat(1)], {0: "S", 1: "T"}, within_s=5.0)
    assert alarm is not None
    assert (alarm.kind, alarm.ranks, alarm.limit_s) == ("stopped", (1,), STOPPED_S)
    assert after_s <= STOPPED_S + 2 * LOOK_S
    assert alarm.reason == "rank 1 is stopped (state T) in phase step after step 7"


def test_stopped_for_a_moment_is_not_stopped(observer: Observer) -> None:
    for index in range(40):
        assert observer.look([replace(beat(0), num_beats=index)], {0: "T" if index % 4 < 3 else "R"}) is None
        observer.now_s += LOOK_S


def test_a_debugger_is_no_fault_and_stops_the_clock_of_all(observer: Observer) -> None:
    ranks = [beat(0), beat(1)]
    assert observer.first(ranks, {0: "S", 1: "t"}, within_s=30.0)[0] is None
    alarm, after_s = observer.first(ranks, within_s=30.0)
    assert alarm is not None
    assert after_s >= LIMITS.step_s  # they get their whole time again


@pytest.mark.parametrize(
    ("phase", "warm", "limit_s"),
    [
        (Phase.START, False, 20.0),
        (Phase.RESTORE, False, 20.0),
        (Phase.DATA, True, 15.0),
        (Phase.STEP, False, 60.0),
        (Phase.STEP, True, 10.0),
        (Phase.EVALUATE, True, 40.0),
        (Phase.SAVE, True, 30.0),
        (Phase.STOPPED, True, 50.0),
    ],
)
def test_every_phase_has_its_limit(observer: Observer, phase: Phase, warm: bool, limit_s: float) -> None:
    alarm, after_s = observer.first([beat(3, phase, warm=warm)], within_s=limit_s + 2.0)
    assert alarm is not None
    assert (alarm.kind, alarm.ranks, alarm.phase, alarm.limit_s) == ("silent", (3,), phase.label, limit_s)
    assert limit_s < after_s <= limit_s + 2.0
    assert alarm.age_s == after_s


def test_who_waits_for_a_long_save_is_not_late(observer: Observer) -> None:
    saving, waiting = beat(0, Phase.SAVE), beat(1, Phase.STEP, group="loop")
    alarm, after_s = observer.first([saving, waiting], within_s=60.0)
    assert alarm is not None
    assert after_s > LIMITS.save_s
    assert alarm.ranks == (0, 1)


def test_who_waits_in_an_exchange_excuses_nobody(observer: Observer) -> None:
    """The others have come to their evaluation and wait there for the one that hangs in its step."""
    alarm, after_s = observer.first([beat(0, Phase.EVALUATE, group="loop"), beat(1)], within_s=60.0)
    assert alarm is not None
    assert alarm.ranks == (1,)
    assert after_s <= LIMITS.step_s + 2.0


def test_the_exchange_and_a_wait_in_the_kernel_are_told(observer: Observer) -> None:
    alarm, _ = observer.first([beat(0, group="loop"), beat(1)], {0: "S", 1: "D"}, within_s=20.0)
    assert alarm is not None
    assert "inside an exchange of the loop group" in alarm.reason
    assert "rank 1 waits in the kernel (state D)" in alarm.reason


def test_a_rank_that_is_gone_is_not_silent(observer: Observer) -> None:
    assert observer.first([beat(0)], {}, within_s=60.0)[0] is None


@pytest.mark.parametrize("pause_s", [30.0, 3600.0])
def test_what_the_observer_slept_through_counts_for_nobody(observer: Observer, pause_s: float) -> None:
    """It was stopped, or the machine was: each rank gets what was left of its time, but for the one second of a look that may be late."""
    assert observer.first([beat(0)], within_s=8.0)[0] is None
    observer.now_s += pause_s
    alarm, after_s = observer.first([beat(0)], within_s=20.0)
    assert alarm is not None
    assert after_s >= LIMITS.step_s - 8.0 - PAUSE_S - 2 * LOOK_S
    assert after_s > 0.0


def test_a_pause_does_not_make_stopped_ranks_of_those_that_were_stopped_with_it(observer: Observer) -> None:
    observer.look([beat(0)], {0: "T"})
    observer.now_s += 3600.0
    assert observer.look([replace(beat(0), num_beats=6)], {0: "R"}) is None
    observer.now_s += LOOK_S
    assert observer.look([replace(beat(0), num_beats=7)], {0: "R"}) is None


def test_a_beat_before_the_first_look_has_no_age(observer: Observer) -> None:
    assert observer.look([replace(beat(0), mono_s=1.0)]) is None
    assert observer.watched.ages_s[0] == 0.0


def test_the_next_generation_starts_without_the_ages_of_the_last(observer: Observer) -> None:
    assert observer.first([beat(0)], within_s=9.0)[0] is None
    observer.watched = Watched()
    assert observer.first([beat(0)], within_s=9.0)[0] is None
