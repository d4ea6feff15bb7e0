from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    assert history == RestartHistory(newest_step=10, num_restarts=1, num_restarts_without_progress=1, restarts_utc_s=(0.0,))


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
    instructions, _ = play(
        [KILLED] * 30, replace(LIMITS, max_restarts=100, no_progress_limit=100, window_restarts=100, restart_wait_s=60.0)
    )
    assert max(item.wait_s for item in instructions) == MAX_WAIT_S


def test_the_reason_is_in_the_words_of_whoever_saw_it() -> None:
    reasons = [instruction.reason for instruction in play([replace(KILLED, reason="the nursery was not ready in time")] * 4)[0]]
    assert reasons[0] == "the nursery was not ready in time (step 10): restart 1 of 5"
    assert all("the nursery was not ready in time (step 10)" in reason for reason in reasons)


def test_a_draw_spreads_the_waits_and_never_the_first() -> None:
    history = RestartHistory(newest_step=10, num_restarts_without_progress=2)
    assert [decide(history, KILLED, LIMITS, draw=draw)[0].wait_s for draw in (0.0, 0.5, 1.0)] == [1.5, 2.0, 2.5]
    assert {decide(RestartHistory(), KILLED, LIMITS, draw=draw)[0].wait_s for draw in (0.0, 1.0)} == {0.0}


def test_too_many_restarts_in_the_window_stop_although_each_made_progress() -> None:
    limits = replace(LIMITS, max_restarts=100, window_restarts=3, window_s=60.0)
    quick = [replace(KILLED, step=step, utc_s=1000.0 + step) for step in range(11, 15)]
    instructions, _ = play(quick, limits)
    assert [item.kind for item in instructions] == ["restart"] * 3 + ["stop"]
    assert instructions[-1].exit_code == 1
    assert "3 restarts in 60 s, launch.window_restarts allows 3" in instructions[-1].reason
    slow = [replace(fault, utc_s=fault.step * 30.0) for fault in quick]
    assert {item.kind for item in play(slow, limits)[0]} == {"restart"}


RAISED = replace(exited(1), cause="exception", fingerprint="ValueError at model.py:12 in forward")


def test_the_same_failure_at_the_same_step_is_deterministic() -> None:
    instructions, _ = play([RAISED, KILLED, RAISED])
    assert [item.kind for item in instructions] == ["restart", "restart", "stop"]
    assert (instructions[-1].exit_code, instructions[-1].grade) == (93, Grade.DETERMINISTIC)
    assert "ValueError at model.py:12 in forward came twice in the step after 10" in instructions[-1].reason


@pytest.mark.parametrize(
    "other",
    [
        {"step": 11},
        {"fingerprint": "ValueError at model.py:13 in forward"},
        {"fingerprint": ""},
        {"step_known": False},
        {"committed_step": 11},  # the step that failed lies behind a checkpoint now
    ],
)
def test_anything_else_than_the_same_is_not(other: dict[str, Any]) -> None:
    assert [item.kind for item in play([RAISED, replace(RAISED, **other)])[0]] == ["restart", "restart"]


def test_a_checkpoint_from_before_the_failure_shows_nothing() -> None:
    """What was staged when it failed is committed after it, and says only how far the run was."""
    assert play([RAISED, replace(RAISED, committed_step=10)])[0][-1].exit_code == 93


def test_ranks_that_run_different_programs_are_not_started_again() -> None:
    instruction, _ = decide(RestartHistory(), replace(KILLED, cause="mismatched-collective"), LIMITS)
    assert (instruction.kind, instruction.exit_code, instruction.grade) == ("stop", 93, Grade.DETERMINISTIC)


def test_a_preemption_ends_with_a_code_that_is_requeued() -> None:
    instruction, _ = decide(RestartHistory(), replace(KILLED, cause="preemption"), LIMITS)
    assert (instruction.kind, instruction.exit_code, instruction.grade) == ("stop", 75, Grade.PLANNED)


def node_lost(*nodes: str, utc_s: float, num_nodes: int = 3, step: int = 10) -> Fault:
    return Fault("node", f"{nodes} silent", None, None, None, step, 0.0, nodes=nodes, num_nodes=num_nodes, utc_s=utc_s)


def test_one_node_is_a_nodes_fault_and_counts() -> None:
    instruction, history = decide(RestartHistory(), node_lost("a", utc_s=5.0), LIMITS)
    assert (instruction.kind, instruction.grade, history.num_restarts) == ("restart", Grade.NODE, 1)


@pytest.mark.parametrize(
    ("num_lost", "num_nodes", "held"),
    [(1, 1, False), (1, 2, False), (2, 2, True), (2, 3, True), (2, 20, True), (2, 21, False), (99, 1000, False), (100, 1000, True)],
)
def test_many_nodes_at_once_hold_the_run(num_lost: int, num_nodes: int, held: bool) -> None:
    nodes = [f"n{number}" for number in range(num_lost)]
    instruction, _ = decide(RestartHistory(), node_lost(*nodes, utc_s=5.0, num_nodes=num_nodes), LIMITS)
    assert (instruction.exit_code, instruction.grade) == ((7, Grade.LARGE_SCALE) if held else (0, Grade.NODE))


@pytest.mark.parametrize(("second_s", "held"), [(9.0, True), (11.0, False)])
def test_losses_count_together_within_the_window(second_s: float, held: bool) -> None:
    _, history = decide(RestartHistory(), node_lost("a", utc_s=0.0), LIMITS)
    instruction, _ = decide(history, node_lost("b", utc_s=second_s), LIMITS)
    assert (instruction.kind == "stop") == held
    again, _ = decide(history, node_lost("a", utc_s=second_s), LIMITS)  # the same node twice is one node
    assert again.kind == "restart"


def test_a_fault_of_the_machine_is_its_nodes() -> None:
    assert decide(RestartHistory(), replace(KILLED, cause="xid"), LIMITS)[0].grade == Grade.NODE
