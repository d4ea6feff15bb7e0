from __future__ import annotations

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.interruptions import Interruptions, fold_interruptions


def told(*lines: tuple[int, int, Event]) -> Interruptions:
    """(generation, seconds, event) of each entry."""
    return fold_interruptions(
        LedgerEntry(n, f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000Z", generation, 1, 0, event, "", "", "", {}, "", "")
        for n, (generation, second, event) in enumerate(lines, start=1)
    )


STARTED, COMMITTED = Event.ATTEMPT_STARTED, Event.CHECKPOINT_COMMITTED


def test_a_run_without_a_start_saw_nothing() -> None:
    assert told() == told((0, 0, Event.RUN_CREATED)) == Interruptions(0, 0.0, None)


def test_a_start_after_one_that_nobody_ended_is_a_failure() -> None:
    assert told((1, 0, STARTED), (1, 60, COMMITTED), (2, 100, STARTED), (2, 130, COMMITTED)) == Interruptions(1, 90.0, None)


def test_leaving_and_finishing_are_none() -> None:
    for event in (Event.RUN_LEFT, Event.RUN_FINISHED, Event.RUN_HALTED):
        assert told((1, 0, STARTED), (1, 30, event), (2, 100, STARTED)) == Interruptions(0, 30.0, None)


def test_what_others_write_later_is_no_training() -> None:
    assert told((1, 0, STARTED), (1, 30, Event.RUN_FINISHED), (1, 900, Event.CHECKPOINT_PROVEN)).observed_s == 30.0


def test_going_back_within_a_start_is_no_interruption() -> None:
    assert told((1, 0, STARTED), (1, 10, Event.REPLAY_DIFFERED), (1, 11, STARTED), (1, 50, COMMITTED)) == Interruptions(0, 50.0, None)


def test_the_last_interval_is_remembered() -> None:
    entry = LedgerEntry(1, "", 1, 1, 0, Event.INTERVAL_TUNED, "", "", "", {"steps": 70}, "", "")
    assert fold_interruptions([entry]).tuned_steps == 70
