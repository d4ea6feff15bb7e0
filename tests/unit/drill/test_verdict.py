"""Verdicts on drills: every promise that can be broken, one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.drill.account import Seen, account
from surefoot.drill.catalogue import CATALOGUE, find_drill
from surefoot.drill.verdict import Ended, failed, judge

KILL, HANG, MISMATCH, TWICE = (CATALOGUE[name] for name in ("kill-a-rank", "hung-rank", "mismatched-collective", "same-step-twice"))


def entry(seq: int, event: Event, *, generation: int = 1, step: int = 0, rule: str = "", at: str = "00.000", **fields: Any) -> LedgerEntry:
    return LedgerEntry(seq, f"2026-01-01T00:00:{at}Z", generation, 1, step, event.value, "agent", rule, "", fields, "", "")


INJECTED = entry(1, Event.DRILL_INJECTED, step=30, fault="SIGKILL", ranks=[1], mono_s=100.0)
LOST = entry(2, Event.RANK_LOST, step=31, at="00.500", rank=1)
AGAIN = entry(3, Event.RESTART_DECIDED, rule="process", kind="restart", exit_code=0)
RESUMED = entry(4, Event.ATTEMPT_STARTED, generation=2, step=20)
TOLD = {"time_utc": "2026-01-01T00:00:00.250Z", "culprit": {"rank": 1, "signal": 9}}
SEEN = Seen(INJECTED, 0.25, None, {"ranks": [1]}, "process", "restart", 0, 20, 11, {"training_again_s": 1.0})
WELL = Ended(exit_code=0, same_bits=True, steps_missing=0, samples_per_step=8)


def problems(drill: Any = KILL, seen: Seen | None = SEEN, ended: Ended = WELL) -> tuple[str, ...]:
    result = judge(drill, seen, ended, rank=1, step=30, seed=0, limit_s=8.0)
    assert result.ok is not bool(result.problems)
    return tuple(result.problems)


def test_what_a_run_wrote_down_becomes_an_account() -> None:
    seen = account([INJECTED, LOST, AGAIN, RESUMED], incidents={1: TOLD}, first_rows={1: 90.0, 2: 101.0})
    assert seen is not None
    assert (seen.detected_s, seen.grade, seen.action, seen.resumed_step, seen.steps_lost) == (0.25, "process", "restart", 20, 11)
    assert seen.culprit == {"ranks": [1]}
    assert seen.recovery == {"training_again_s": 0.75}
    assert account([LOST], incidents={}, first_rows={}) is None


def test_the_clock_of_an_alarm_counts_before_stamps() -> None:
    incident = {**TOLD, "alarm": {"detected_mono_s": 103.0, "limit_s": 4.0}, "culprit": {"ranks": [0, 1], "cause": "mismatched-collective"}}
    seen = account([INJECTED, LOST], incidents={1: incident}, first_rows={})
    assert seen is not None
    assert (seen.detected_s, seen.limit_s) == (3.0, 4.0)
    assert seen.culprit == {"ranks": [0, 1], "cause": "mismatched-collective"}
    assert (seen.action, seen.recovery) == (None, {})


def test_without_an_incident_the_ledger_says_when_and_who() -> None:
    seen = account([INJECTED, LOST], incidents={}, first_rows={})
    assert seen is not None
    assert (seen.detected_s, seen.culprit) == (0.5, {"ranks": [1]})
    left = account([INJECTED, entry(2, Event.RUN_LEFT, at="01.000")], incidents={}, first_rows={})
    assert left is not None
    assert (left.action, left.culprit) == ("leave", None)


def test_a_split_that_the_run_measured_is_handed_on() -> None:
    measured = entry(5, Event.RUN_RESUMED, generation=2, recovery={"detect_s": 0.2, "load_s": 0.1, "note": "x"})
    seen = account([INJECTED, LOST, AGAIN, measured], incidents={}, first_rows={})
    assert seen is not None
    assert seen.recovery == {"detect_s": 0.2, "load_s": 0.1}


def test_a_kept_promise_has_no_problems() -> None:
    result = judge(KILL, SEEN, WELL, rank=1, step=30, seed=0, limit_s=8.0)
    assert (result.ok, result.bound_s, result.samples_lost, result.samples_repeated, result.culprit_right) == (True, 1.0, 0, 88, True)


@pytest.mark.parametrize(
    ("seen", "ended", "words"),
    [
        (replace(SEEN, detected_s=1.5), WELL, "the bound is 1 s"),
        (replace(SEEN, detected_s=None), WELL, "nothing in the ledger"),
        (replace(SEEN, culprit={"ranks": [0]}), WELL, "blamed [0]"),
        (replace(SEEN, culprit={"ranks": [0, 1]}), WELL, "blamed [0, 1]"),
        (replace(SEEN, culprit=None), WELL, "blamed nobody"),
        (replace(SEEN, action="stop"), WELL, "action stop"),
        (replace(SEEN, grade="node"), WELL, "graded node"),
        (SEEN, replace(WELL, same_bits=False), "not that of a run"),
        (SEEN, replace(WELL, exit_code=1), "ended with 1"),
        (SEEN, replace(WELL, steps_missing=2), "2 steps were never trained"),
    ],
)
def test_each_broken_promise_is_named(seen: Seen, ended: Ended, words: str) -> None:
    (problem,) = problems(seen=seen, ended=ended)
    assert words in problem


def test_a_hang_may_take_the_limit_that_was_broken() -> None:
    assert problems(HANG, replace(SEEN, detected_s=5.9, limit_s=4.0)) == ()
    assert "the bound is 6 s" in problems(HANG, replace(SEEN, detected_s=6.1, limit_s=4.0))[0]
    assert problems(HANG, replace(SEEN, detected_s=9.9)) == ()


def test_what_is_to_stop_must_stop() -> None:
    stopped = replace(SEEN, action="stop", grade="deterministic", culprit={"ranks": [0, 1]})
    ended = Ended(exit_code=93, same_bits=None, steps_missing=0, samples_per_step=8)
    assert problems(MISMATCH, stopped, ended) == ()
    assert problems(MISMATCH, replace(stopped, culprit={"ranks": [], "candidates": [0, 1]}), ended) == ()
    assert "blamed []" in problems(MISMATCH, replace(stopped, culprit={"ranks": [], "candidates": [0]}), ended)[0]
    assert "blamed [0, 1]" in problems(TWICE, stopped, ended)[0]
    assert "wanted 93" in problems(MISMATCH, stopped, replace(ended, exit_code=1))[0]


def test_a_preemption_blames_nobody() -> None:
    drill = CATALOGUE["preemption"]
    left = replace(SEEN, action="leave", grade=None, culprit=None)
    assert problems(drill, left) == ()
    assert judge(drill, left, WELL, rank=None, step=30, seed=0, limit_s=8.0).grade == "planned"
    assert "blamed [1]" in problems(drill, replace(left, culprit={"ranks": [1]}))[0]


def test_a_fault_that_never_struck_proves_nothing() -> None:
    assert problems(seen=None) == ("the fault was never injected",)
    assert failed(KILL, "no room", rank=0, step=1, seed=2).as_json()["problems"] == ("no room",)


def test_the_catalogue_is_whole_and_says_what_is_missing() -> None:
    assert [drill.number for drill in CATALOGUE.values()] == list(range(1, 32))
    assert all(bool(drill.needs) is not drill.can_run for drill in CATALOGUE.values())
    with pytest.raises(ConfigError, match="did you mean kill-a-rank"):
        find_drill("kil-a-rank")
    with pytest.raises(ConfigError, match="needs several nodes"):
        find_drill("cut-a-node-off")
