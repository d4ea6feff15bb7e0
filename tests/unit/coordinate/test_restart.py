from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.coordinate.restart import MAX_WAIT_S, RestartHistory, decide
from surefoot.core.records import Fault, Grade, Instruction
from surefoot.core.sections import LaunchSection

LIMITS = LaunchSection(max_restarts=5, no_progress_limit=3, restart_wait_s=1.0)
KILLED = Fault("rank", reason="rank 1 was killed by SIGKILL", rank=1, exit_code=None, signal=9, step=10, detected_mono_s=0.0)


def exited(code: int, *, step: int = 10) -> Fault:
    return replace(KILLED, exit_code=code, signal=None, step=step)


@pytest.mark.parametrize(
    ("code", "grade"),
    [
        (2, Grade.DETERMINISTIC),
        (3, Grade.DETERMINISTIC),
        (4, Grade.DETERMINISTIC),
        (5, Grade.DETERMINISTIC),
        (6, Grade.PLANNED),
        (7, Grade.LARGE_SCALE),
        (93, Grade.DETERMINISTIC),
    ],
)
def test_codes_that_a_restart_cannot_mend_stop_with_that_code(code: int, grade: Grade) -> None:
    instruction, history = decide(RestartHistory(), exited(code), LIMITS)
    assert (instruction.kind, instruction.exit_code, instruction.grade) == ("stop", code, grade)
    assert history.num_restarts == 0


@pytest.mark.parametrize("code", [2, 5, 6])
def test_such_a_code_counts_even_while_leaving(code: int) -> None:
    assert decide(RestartHistory(leave_requested=True), exited(code), LIMITS)[0].exit_code == code


@pytest.mark.parametrize(
    "fault",
    [
        KILLED,
        exited(1),
        exited(75),
        exited(134),
        replace(KILLED, what="nursery", rank=None),
        replace(KILLED, what="init-deadline", rank=None, signal=None),
    ],
)
def test_anything_else_is_worth_a_restart_at_once(fault: Fault) -> None:
    instruction, history = decide(RestartHistory(), fault, LIMITS)
    assert (instruction.kind, instruction.wait_s, instruction.grade) == ("restart", 0.0, Grade.PROCESS)
    assert history == RestartHistory(newest_step=10, num_restarts=1, num_restarts_without_progress=1)


@pytest.mark.parametrize("fault", [KILLED, exited(1), exited(75)])
def test_while_leaving_nothing_is_restarted(fault: Fault) -> None:
    instruction, _ = decide(RestartHistory(leave_requested=True), fault, LIMITS)
    assert (instruction.kind, instruction.exit_code, instruction.grade) == ("stop", 75, Grade.PLANNED)


def play(faults: list[Fault], limits: LaunchSection = LIMITS) -> tuple[list[Instruction], RestartHistory]:
    history, instructions = RestartHistory(), []
    for fault in faults:
        instruction, history = decide(history, fault, limits)
        instructions.append(instruction)
    return instructions, history


def test_restarts_without_a_new_step_wait_longer_and_longer_and_then_stop() -> None:
    instructions, _ = play([KILLED] * 4)
    assert [item.kind for item in instructions] == ["restart"] * 3 + ["stop"]
    assert [item.wait_s for item in instructions[:3]] == [0.0, 1.0, 2.0]
    assert (instructions[3].exit_code, instructions[3].grade) == (93, Grade.DETERMINISTIC)
    assert "no step after 10 was finished in 3 restarts in a row" in instructions[3].reason


def test_doing_old_steps_again_is_no_progress() -> None:
    instructions, _ = play([replace(KILLED, step=step) for step in (10, 4, 10, 9)])
    assert instructions[-1].exit_code == 93


def test_a_new_step_starts_the_count_again() -> None:
    instructions, history = play([replace(KILLED, step=step) for step in (10, 10, 10, 11, 11)])
    assert [item.kind for item in instructions] == ["restart"] * 5
    assert [item.wait_s for item in instructions] == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert history.num_restarts == 5


@pytest.mark.parametrize(("last", "code"), [(KILLED, 1), (exited(1), 1), (exited(75), 75)])
def test_the_budget_ends_with_a_code_that_says_whether_to_requeue(last: Fault, code: int) -> None:
    faults = [replace(KILLED, step=step) for step in range(1, 6)] + [replace(last, step=6)]
    instructions, history = play(faults)
    assert [item.kind for item in instructions] == ["restart"] * 5 + ["stop"]
    assert (instructions[-1].exit_code, history.num_restarts) == (code, 5)
    assert "all 5 restarts are used up" in instructions[-1].reason


def test_no_restart_is_allowed_with_a_budget_of_zero() -> None:
    assert decide(RestartHistory(), KILLED, replace(LIMITS, max_restarts=0))[0].kind == "stop"


def test_waits_are_bounded() -> None:
    instructions, _ = play([KILLED] * 30, replace(LIMITS, max_restarts=100, no_progress_limit=100, restart_wait_s=60.0))
    assert max(item.wait_s for item in instructions) == MAX_WAIT_S


def test_the_reason_is_in_the_words_of_whoever_saw_it() -> None:
    reasons = [instruction.reason for instruction in play([replace(KILLED, reason="the nursery was not ready in time")] * 4)[0]]
    assert reasons[0] == "the nursery was not ready in time (step 10): restart 1 of 5"
    assert all("the nursery was not ready in time (step 10)" in reason for reason in reasons)
