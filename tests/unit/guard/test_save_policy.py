from __future__ import annotations

import pytest

from surefoot.core.records import Signals
from surefoot.core.sections import CheckpointSection
from surefoot.guard.save_policy import is_kept_for_good, reason_to_save


def signals(*, leave: bool = False, save: bool = False, clock_s: float = 0.0) -> Signals:
    return Signals(
        step=0,
        attempt=1,
        generation=1,
        loss=1.0,
        num_live_tokens=1,
        grad_norm=1.0,
        num_nonfinite=0,
        leave_requested=leave,
        save_requested=save,
        save_clock_s=clock_s,
        save_stall_s=0.0,
        save_slot_free=True,
        block_requested=False,
        ranks=(),
    )


SECTION = CheckpointSection(interval_steps=10, interval_s=60.0, milestone_steps=25, keep_steps=(33,))


@pytest.mark.parametrize(
    ("step", "given", "word"),
    [
        (100, signals(), "finished"),
        (7, signals(leave=True), "leave"),
        (7, signals(save=True), "asked for a save"),
        (20, signals(), "every 10 steps"),
        (25, signals(), "milestone"),
        (33, signals(), "keep_steps"),
        (7, signals(clock_s=61.0), "every 60 s"),
    ],
)
def test_each_reason_fires(step: int, given: Signals, word: str) -> None:
    reason = reason_to_save(step, given, SECTION, num_steps=100, last_saved_step=0)
    assert reason is not None
    assert word in reason


def test_an_ordinary_step_is_not_saved() -> None:
    assert reason_to_save(7, signals(clock_s=59.0), SECTION, num_steps=100, last_saved_step=0) is None


def test_a_saved_step_is_not_saved_twice() -> None:
    assert reason_to_save(20, signals(leave=True), SECTION, num_steps=20, last_saved_step=20) is None


def test_intervals_at_zero_are_off() -> None:
    off = CheckpointSection(interval_steps=0, interval_s=0.0, milestone_steps=0)
    assert reason_to_save(500, signals(clock_s=1e9), off, num_steps=1000, last_saved_step=0) is None


@pytest.mark.parametrize(("step", "saves"), [(11, False), (12, True), (30, True)])
def test_auto_counts_from_the_last_save(step: int, saves: bool) -> None:
    auto = CheckpointSection(interval_steps="auto", milestone_steps=0)
    reason = reason_to_save(step, signals(), auto, num_steps=100, last_saved_step=5, auto_steps=7)
    assert (reason == "every 7 steps, as measured") is saves
    assert reason_to_save(504, signals(), auto, num_steps=1000, last_saved_step=5) is None  # 500 until it has measured
    assert reason_to_save(505, signals(), auto, num_steps=1000, last_saved_step=5) is not None


@pytest.mark.parametrize(("step", "kept"), [(50, True), (51, False), (13, True), (14, False)])
def test_multiples_of_the_milestone_and_changes_of_the_run_are_kept_for_good(step: int, kept: bool) -> None:
    assert is_kept_for_good(step, milestone_steps=25, boundaries={13}) is kept


def test_without_milestones_no_step_is_one() -> None:
    assert not is_kept_for_good(50, milestone_steps=0, boundaries=())
