from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.coordinate.forming import largest_legal
from surefoot.coordinate.members import (
    BecameReady,
    Begin,
    CallOff,
    CameBack,
    Decision,
    DrainAsked,
    EndedHere,
    Faulted,
    Happening,
    HoldBegun,
    Instructed,
    JobOpened,
    JobOver,
    Lapsed,
    LimitsChanged,
    MemberLimits,
    Membership,
    ReadmitAsked,
    Refusal,
    ReleaseAsked,
    Seat,
    WantsToLeave,
    WentSilent,
)
from surefoot.coordinate.membership import advance, due_s, is_acknowledged
from surefoot.coordinate.membership_journal import MembershipJournal, read_journal, replay
from surefoot.coordinate.restart import RestartHistory
from surefoot.coordinate.silence import Silence, SilenceLimits, look
from surefoot.core.errors import Corrupt, PeerLost
from tests.unit.coordinate.membership_job import JUDGE, LIMITS, Steps, fault, joined, running


def only(kind: type[Decision], decisions: tuple[Decision, ...]) -> Decision:
    (found,) = (decision for decision in decisions if isinstance(decision, kind))
    return found


def begun(decisions: tuple[Decision, ...]) -> tuple[str, ...]:
    begin = only(Begin, decisions)
    assert isinstance(begin, Begin)
    return tuple(place.node for place in begin.places)


def end_all(steps: Steps, *names: str) -> tuple[Decision, ...]:
    return steps.tell(*(EndedHere(name, steps.state.generation, "stopped") for name in names))


def ready(*names: str) -> list[Happening]:
    return [BecameReady(name, 2000) for name in names]


def test_a_generation_waits_for_the_last_call_and_takes_places_by_arrival() -> None:
    steps = Steps(Membership(LIMITS))
    assert not [item for item in steps.arrive("a", "b") if isinstance(item, Begin)]
    assert due_s(steps.state) == LIMITS.last_call_s
    assert begun(steps.tell(wait_s=LIMITS.last_call_s)) == ("a", "b")
    assert steps.state.phase == "running"


def test_when_all_are_there_nothing_is_waited_for_and_the_rest_are_spares() -> None:
    steps = Steps(Membership(LIMITS))
    assert begun(steps.arrive("a", "b", "c", "d")) == ("a", "b", "c")
    assert steps.state.nodes["d"].state is Seat.SPARE


def test_a_spare_takes_the_place_of_a_lost_node_and_node_0_keeps_its_own() -> None:
    steps = Steps(Membership(LIMITS))
    steps.arrive("a", "b", "c", "d")
    stop = only(CallOff, steps.tell(Lapsed("b", "silent")))
    assert isinstance(stop, CallOff)
    assert (stop.nodes, stop.in_order) == (("a", "c"), False)
    end_all(steps, "a", "c")
    steps.tell(*ready("c", "a"))
    assert begun(steps.tell(wait_s=LIMITS.last_call_s)) == ("a", "c", "d")


def test_when_node_0_is_lost_the_next_one_leads() -> None:
    steps = running("a", "b", "c")
    steps.tell(Lapsed("a", "silent"))
    end_all(steps, "b", "c")
    steps.tell(*ready("b", "c"))
    assert begun(steps.tell(wait_s=LIMITS.last_call_s)) == ("b", "c")


def test_no_generation_begins_before_every_rank_of_the_last_is_gone() -> None:
    steps = running("a", "b", "c")
    steps.tell(Faulted("a", 1, fault()))
    assert not [item for item in steps.tell(EndedHere("a", 1, "failed", fault()), *ready("a")) if isinstance(item, Begin)]
    steps.tell(EndedHere("b", 1, "stopped"), *ready("b"), wait_s=20.0)
    assert steps.state.outstanding == {"c"}
    assert steps.state.phase == "stopping"


def test_a_join_ends_the_generation_in_good_order_and_costs_no_budget() -> None:
    steps = running("a", "b")
    steps.arrive("c")
    stop = only(CallOff, steps.tell(wait_s=LIMITS.last_call_s))
    assert isinstance(stop, CallOff)
    assert stop.in_order
    end_all(steps, "a", "b")
    assert begun(steps.tell(*ready("a", "b"))) == ("a", "b", "c")
    assert (steps.state.num_restarts, steps.state.history.num_restarts) == (0, 0)


def test_a_fault_costs_a_restart_of_the_whole_job() -> None:
    steps = running("a", "b")
    steps.tell(EndedHere("a", 1, "failed", fault()), EndedHere("b", 1, "stopped"))
    assert (steps.state.num_restarts, steps.state.history.num_restarts) == (1, 1)


def test_a_suspect_that_comes_back_in_time_loses_nothing() -> None:
    steps = running("a", "b")
    steps.tell(WentSilent("a", "not heard for 3 s"))
    assert steps.state.nodes["a"].state is Seat.SUSPECT
    steps.tell(CameBack("a"))
    assert (steps.state.nodes["a"].state, steps.state.phase) == (Seat.ACTIVE, "running")


def test_many_at_once_are_held_until_a_person_releases_them() -> None:
    steps = running("a", "b", "c")
    steps.tell(Lapsed("a", "silent"))
    steps.tell(Lapsed("b", "silent"))
    decisions = end_all(steps, "c")
    told = only(Instructed, decisions)
    assert isinstance(told, Instructed)
    assert (told.nodes, told.instruction.exit_code) == (("c",), 7)
    assert only(HoldBegun, decisions)
    steps.arrive("a", "b")
    assert (steps.state.phase, steps.state.generation) == ("held", 1)
    steps.tell(ReleaseAsked("switch replaced", "ops"), *ready("a", "b", "c"))
    assert (steps.state.phase, steps.state.generation) == ("running", 2)
    assert only(Refusal, steps.tell(ReleaseAsked("again", "ops")))


def test_what_comes_with_an_old_generation_is_refused() -> None:
    steps = running("a", "b")
    for stale in (Faulted("a", 0, fault()), EndedHere("a", 0, "failed", fault())):
        assert only(Refusal, steps.tell(stale)).generation == 1
    assert steps.state.phase == "running"


def test_a_dead_node_that_returns_with_its_ranks_is_fenced_until_it_has_none() -> None:
    steps = running("a", "b", "c")
    steps.tell(Lapsed("c", "silent"))
    assert only(Refusal, steps.tell(joined("c", generation=1)))
    assert (steps.state.nodes["c"].state, is_acknowledged(steps.state, "c")) == (Seat.FENCED, False)
    steps.tell(*ready("c"))
    assert (steps.state.nodes["c"].state, is_acknowledged(steps.state, "c")) == (Seat.JOINING, True)


def test_whoever_does_not_stop_is_fenced_and_waited_out() -> None:
    steps = running("a", "b", "c")
    steps.tell(EndedHere("a", 1, "failed", fault()), EndedHere("b", 1, "stopped"))
    steps.tell(*ready("a", "b"), wait_s=LIMITS.stop_s)
    assert not is_acknowledged(steps.state, "c")
    assert steps.state.phase == "stopping"
    assert begun((*steps.tell(Lapsed("c", "silent")), *steps.tell(wait_s=LIMITS.last_call_s))) == ("a", "b")


def test_an_end_in_good_order_that_takes_too_long_becomes_one_at_once() -> None:
    steps = running("a", "b", "c")
    steps.tell(WantsToLeave("c", "preempted"))
    stop = only(CallOff, steps.tell(wait_s=LIMITS.leave_s))
    assert isinstance(stop, CallOff)
    assert not stop.in_order


def test_one_that_leaves_is_told_so_and_the_others_go_on() -> None:
    steps = running("a", "b", "c")
    steps.tell(WantsToLeave("c", "preempted"))
    told = [item for item in end_all(steps, "a", "b", "c") if isinstance(item, Instructed)]
    assert [(item.nodes, item.instruction.kind, item.instruction.exit_code) for item in told] == [
        (("a", "b"), "restart", 0),
        (("c",), "stop", 75),
    ]
    steps.tell(WantsToLeave("c", "gone"), *ready("a", "b"))
    steps.tell(wait_s=LIMITS.last_call_s)
    assert (steps.state.phase, steps.state.members, steps.state.num_restarts) == ("running", ("a", "b"), 0)


def test_a_drained_machine_stays_parked_until_it_is_readmitted() -> None:
    steps = running("a", "b", "c")
    steps.tell(DrainAsked("c", "fan", "ops"))
    end_all(steps, "a", "b", "c")
    steps.tell(*ready("a", "b", "c"))
    assert (steps.state.members, steps.state.nodes["c"].state) == (("a", "b"), Seat.PARKED)
    steps.tell(replace(joined("c"), node="c-after-a-reboot", machine="machine-c"))
    assert steps.state.nodes["c-after-a-reboot"].state is Seat.PARKED
    steps.tell(ReadmitAsked("c", "mended", "ops"))
    assert (steps.state.nodes["c"].state, steps.state.nodes["c"].reason) == (Seat.JOINING, "readmitted by ops: mended")
    assert only(Refusal, steps.tell(ReadmitAsked("c", "mended", "ops")))


def test_a_drain_that_would_leave_too_few_is_refused() -> None:
    steps = running("a", "b")
    refusal = only(Refusal, steps.tell(DrainAsked("a", "fan", "ops")))
    assert "at least 2 are needed" in refusal.reason
    assert steps.state.phase == "running"


def test_a_node_that_is_too_small_parks() -> None:
    steps = Steps(Membership(LIMITS))
    steps.arrive("a", capacity=1)
    assert (steps.state.nodes["a"].state, steps.state.nodes["a"].reason) == (Seat.PARKED, "it has room for 1 ranks, 2 are needed")


def test_the_job_is_over_when_every_member_is_finished() -> None:
    steps = running("a", "b")
    assert not [item for item in steps.tell(EndedHere("a", 1, "finished")) if isinstance(item, JobOver)]
    over = only(JobOver, steps.tell(EndedHere("b", 1, "finished")))
    assert isinstance(over, JobOver)
    assert over.exit_code == 0


def test_another_job_goes_on_with_a_higher_generation_and_blames_nobody_of_the_last() -> None:
    steps = running("a", "b")
    steps.tell(JobOpened("job-2", 7, RestartHistory(newest_step=40, num_restarts=3)))
    steps.tell(Lapsed("a", "silent"), Lapsed("b", "silent"))
    steps.arrive("c", "d")
    steps.tell(wait_s=LIMITS.last_call_s)
    assert (steps.state.phase, steps.state.generation, steps.state.members) == ("running", 8, ("c", "d"))
    assert (steps.state.history.num_restarts, steps.state.lost) == (3, ())


@pytest.mark.parametrize(("num_nodes", "expected"), [(1, 0), (2, 2), (3, 2), (4, 4), (7, 4), (9, 8)])
def test_only_counts_with_a_layout_are_used(num_nodes: int, expected: int) -> None:
    assert largest_legal(MemberLimits(2, 8, 8, legal_nodes=(1, 2, 4, 8)), num_nodes) == expected


def test_a_shrink_to_a_legal_count_leaves_a_spare() -> None:
    steps = running("a", "b", "c", "d", limits=replace(LIMITS, max_nodes=4, legal_nodes=(2, 4)))
    steps.tell(Lapsed("a", "silent"))
    end_all(steps, "b", "c", "d")
    steps.tell(*ready("b", "c", "d"))
    steps.tell(wait_s=LIMITS.last_call_s)
    assert steps.state.members == ("b", "c")
    assert steps.state.nodes["d"].state is Seat.SPARE


def test_a_pause_of_our_own_extends_every_lease() -> None:
    limits = SilenceLimits()
    silence, _ = look(Silence(), heard=("a", "b"), now_s=0.0, limits=limits)
    silence, changes = look(silence, heard=(), now_s=60.0, limits=limits)
    assert not changes
    silence, _ = look(silence, heard=("a",), now_s=60.1, limits=limits)
    kinds = []
    for tenth in range(602, 660):
        silence, changes = look(silence, heard=("a",), now_s=tenth / 10, limits=limits)
        kinds += [(change.node, change.kind) for change in changes]
    assert kinds == [("b", "suspect"), ("b", "lapsed")]


def test_a_node_fences_itself_before_it_lapses_and_lapses_before_its_time_is_out() -> None:
    limits = SilenceLimits()
    assert limits.suspect_s < limits.fence_s < limits.lapse_s < limits.dead_s


def write(path: Path, steps: Steps) -> None:
    journal = MembershipJournal(path)
    for at_s, happenings in steps.log:
        journal.append(happenings, (), at_s=at_s, time_utc="2026-01-01T00:00:00Z")
    journal.close()


def a_long_life() -> Steps:
    steps = Steps(Membership(LIMITS))
    steps.tell(LimitsChanged(replace(LIMITS, legal_nodes=(2, 3))), JobOpened("job", 3, RestartHistory(newest_step=5), 1e9))
    steps.arrive("a", "b", "c", "d")
    steps.tell(EndedHere("a", 4, "failed", fault()), WentSilent("b", "not heard"), wait_s=0.1)
    steps.tell(CameBack("b"), DrainAsked("d", "fan", "ops"), Lapsed("c", "silent", 1.5, 9), wait_s=0.1)
    return steps


def test_a_journal_gives_the_state_again_and_a_torn_tail_is_cut(tmp_path: Path) -> None:
    path, steps = tmp_path / "journal.jsonl", a_long_life()
    write(path, steps)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert replay(Membership(LIMITS), read_journal(path), judge=JUDGE) == steps.state
    journal = MembershipJournal(path)
    journal.close()
    assert (journal.num_torn_bytes, path.read_bytes()) == (20, whole)


def test_a_journal_that_another_wrote_to_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    old, new = MembershipJournal(path), MembershipJournal(path)
    new.append((CameBack("a"),), (), at_s=1.0, time_utc="")
    with pytest.raises(PeerLost, match="another coordinator"):
        old.append((CameBack("b"),), (), at_s=2.0, time_utc="")
    old.close()
    new.close()


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, a_long_life())
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:-5]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(Corrupt, match="line 2"):
        list(read_journal(path))


def test_happenings_of_nodes_that_nobody_knows_change_nothing() -> None:
    state = Membership(LIMITS)
    for happening in (WentSilent("x", ""), CameBack("x"), Lapsed("x", ""), WantsToLeave("x", "")):
        after, decisions = advance(state, (happening,), at_s=0.0, judge=JUDGE)
        assert (after, decisions) == (state, ())
    assert isinstance(only(Refusal, advance(state, (BecameReady("x", 1),), at_s=0.0, judge=JUDGE)[1]), Refusal)
