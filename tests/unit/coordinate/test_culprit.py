from __future__ import annotations

import itertools
import random
import signal
from dataclasses import replace

import pytest

from surefoot.coordinate.causes import Cause
from surefoot.coordinate.culprit import find_culprit
from surefoot.coordinate.witness import Alarm, GroupState, Witness

SILENT = Alarm("silent", (0, 1, 2), "no rank moved for 12 s in phase step", 100.0, phase="step", age_s=12.0, limit_s=10.0)
EXIT = Alarm("exit", (0,), "rank 0 left with exit code 75", 100.0)
DONE = GroupState("default", last_enqueued=7, last_completed=7, operation="gloo:all_reduce")
WAITS = GroupState("default", last_enqueued=8, last_completed=7, operation="gloo:all_reduce", shapes=((4,),), dtypes=("Float",))


def rank(number: int, *groups: GroupState, **facts: object) -> Witness:
    answer = Witness(number, 1000 + number, "S", None, 12.0, node=f"node{number}", groups=groups)
    return replace(answer, **facts)  # type: ignore[arg-type]  # facts are fields by name


def gone(number: int, at_s: float, *, code: int | None = None, killed: int | None = None) -> Witness:
    return rank(number, process_state="", groups=None, exit_code=code, signal=killed, exit_mono_s=at_s)


def test_who_was_killed_is_to_blame_and_not_who_complained_first() -> None:
    found = find_culprit(EXIT, [gone(0, 99.95, code=75), gone(2, 100.0, killed=signal.SIGKILL), gone(1, 99.97, code=75)])
    assert (found.ranks, found.cause, found.confidence, found.nodes) == ((2,), Cause.KILLED, "certain", ("node2",))


def test_a_foreign_loop_complains_in_the_words_of_gloo() -> None:
    victim = replace(gone(0, 99.0, code=1), details={"last_error_lines": ["RuntimeError: [pair.cc:534] Connection closed by peer [::1]:5"]})
    assert find_culprit(EXIT, [victim, gone(1, 100.0, killed=signal.SIGSEGV)]).ranks == (1,)
    own = replace(victim, details={"last_error_lines": ["ValueError: no such column"]})  # control: an error of its own is no complaint
    assert find_culprit(EXIT, [own, gone(1, 100.0, killed=signal.SIGSEGV)]).ranks == (0,)


def test_of_several_deaths_the_earliest_counts_and_the_others_are_told() -> None:
    found = find_culprit(EXIT, [gone(0, 10.0, code=1), gone(1, 8.0, code=1), gone(2, 8.05, code=1)])
    assert (found.ranks, found.candidates, found.confidence) == ((1,), (2,), "likely")
    assert found.alternatives == ("rank 2 ended within 0.1 s of it", "rank 0 ended after it")


def test_a_signal_counts_before_an_error_of_the_same_moment() -> None:
    assert find_culprit(EXIT, [gone(0, 8.0, code=1), gone(1, 8.05, killed=signal.SIGKILL)]).ranks == (1,)
    assert find_culprit(EXIT, [gone(0, 8.0, code=1), gone(1, 8.5, killed=signal.SIGKILL)]).ranks == (0,)


def test_a_stopped_rank_is_to_blame_for_those_that_gave_up_on_it() -> None:
    found = find_culprit(EXIT, [gone(0, 99.0, code=75), rank(1, WAITS), rank(2, process_state="T", groups=None)])
    assert (found.ranks, found.cause, found.confidence) == ((2,), Cause.STOPPED, "certain")
    assert found.collective == WAITS
    assert found.reason == "rank 2 on node2 is stopped (state T) while rank 1 on node1 waits in gloo:all_reduce (group default, number 8)"


def test_two_stopped_ranks_are_both_named() -> None:
    stopped = [rank(number, process_state="T", groups=None) for number in (1, 2)]
    assert find_culprit(SILENT, [rank(0, WAITS), *stopped]).ranks == (1, 2)


def test_the_rank_that_is_behind_is_missing() -> None:
    found = find_culprit(SILENT, [rank(0, WAITS), rank(1, DONE), rank(2, WAITS)])
    assert (found.ranks, found.cause, found.confidence, found.nodes) == ((1,), Cause.BEAT_LAPSE, "certain", ("node1",))
    assert "waits in no collective" in found.evidence[1]


def test_who_does_not_answer_while_the_others_wait_is_likely() -> None:
    found = find_culprit(SILENT, [rank(0, WAITS), rank(1, groups=None), rank(2, WAITS)])
    assert (found.ranks, found.confidence) == ((1,), "likely")


def test_who_complained_and_left_is_not_missing() -> None:
    """It gave no numbers, but it is a victim: the one that is behind is to blame alone."""
    assert find_culprit(SILENT, [gone(0, 99.0, code=75), rank(1, WAITS), rank(2, DONE)]).ranks == (2,)


def test_who_is_done_too_early_is_missing() -> None:
    found = find_culprit(SILENT, [gone(0, 99.0, code=0), rank(1, WAITS)])
    assert (found.ranks, found.confidence) == ((0,), "certain")
    assert found.reason.startswith("rank 0 on node0 is gone while")


def test_waits_are_followed_through_groups_to_the_one_that_waits_for_nobody() -> None:
    """Rank 0 waits for 1 in one group, which waits for 2 in another: only 2 does nothing."""
    left, right = replace(WAITS, name="left"), replace(WAITS, name="right")
    behind = {name: replace(DONE, name=name) for name in ("left", "right")}
    chain = [rank(0, left), rank(1, behind["left"], right), rank(2, behind["right"])]
    assert all(find_culprit(SILENT, order).ranks == (2,) for order in itertools.permutations(chain))


def test_a_circle_of_waits_is_a_mismatch_across_groups() -> None:
    left, right = replace(WAITS, name="left"), replace(WAITS, name="right")
    found = find_culprit(SILENT, [rank(0, left, replace(DONE, name="right")), rank(1, right, replace(DONE, name="left"))])
    assert (found.ranks, found.cause, found.confidence) == ((0, 1), Cause.MISMATCHED_COLLECTIVE, "inconclusive")
    assert "rank 0 on node0 called gloo:all_reduce (group left, number 8) while rank 1 on node1 called" in found.reason
    third = rank(2, right, replace(DONE, name="left"))
    odd = find_culprit(SILENT, [rank(0, left, replace(DONE, name="right")), rank(1, right, replace(DONE, name="left")), third])
    assert (odd.ranks, odd.candidates, odd.confidence) == ((0,), (1, 2), "likely")


def test_another_operation_under_the_same_number_is_a_mismatch() -> None:
    found = find_culprit(SILENT, [rank(0, WAITS), rank(1, replace(WAITS, operation="gloo:barrier", shapes=())), rank(2, WAITS)])
    assert (found.ranks, found.candidates, found.cause) == ((1,), (0, 2), Cause.MISMATCHED_COLLECTIVE)
    assert found.reason == (
        "mismatched collective 8 of group default: rank 1 on node1 called gloo:barrier "
        "while ranks 0, 2 on node0, node2 called gloo:all_reduce of [4] Float"
    )


@pytest.mark.parametrize("other", [{"shapes": ((5,),)}, {"dtypes": ("Double",)}])
def test_another_shape_or_dtype_is_a_mismatch_too(other: dict[str, object]) -> None:
    found = find_culprit(SILENT, [rank(0, WAITS), rank(1, replace(WAITS, **other))])  # type: ignore[arg-type]
    assert (found.ranks, found.cause, found.confidence) == ((0, 1), Cause.MISMATCHED_COLLECTIVE, "inconclusive")


def test_operations_that_may_have_different_inputs_are_none() -> None:
    scatter = replace(WAITS, operation="gloo:scatter")
    assert find_culprit(SILENT, [rank(0, scatter), rank(1, replace(scatter, shapes=()))]).cause == Cause.COLLECTIVE_TIMEOUT


def test_all_in_one_collective_is_the_network_and_no_rank() -> None:
    found = find_culprit(SILENT, [rank(number, WAITS) for number in range(3)])
    assert (found.ranks, found.candidates, found.cause) == ((), (0, 1, 2), Cause.COLLECTIVE_TIMEOUT)
    assert found.nodes == ("node0", "node1", "node2")


def test_point_to_point_numbers_say_nothing_about_a_group() -> None:
    stage = [rank(0, replace(WAITS, is_p2p=True)), rank(1, replace(DONE, is_p2p=True))]
    assert find_culprit(SILENT, stage).confidence == "inconclusive"


def test_without_numbers_the_stacks_tell_who_is_outside() -> None:
    inside = ("torch/distributed/distributed_c10d.py:2806 in all_reduce", "step.py:4 in step")
    seen = [rank(0, groups=None, stack=inside), rank(1, groups=None, stack=("model.py:12 in forward",)), rank(2, groups=None, stack=inside)]
    found = find_culprit(SILENT, seen)
    assert (found.ranks, found.confidence, found.fingerprint) == ((1,), "likely", "hangs at model.py:12 in forward")
    assert find_culprit(SILENT, [replace(one, stack=inside) for one in seen]).ranks == ()  # control


def test_a_lone_suspect_is_likely_and_several_are_candidates() -> None:
    nobody_tells = [rank(number, groups=None) for number in range(3)]
    assert find_culprit(replace(SILENT, ranks=(1,)), nobody_tells).ranks == (1,)
    found = find_culprit(SILENT, nobody_tells)
    assert (found.ranks, found.candidates, found.confidence) == ((), (0, 1, 2), "inconclusive")


def test_complaints_alone_name_those_that_are_still_there() -> None:
    found = find_culprit(EXIT, [gone(0, 99.0, code=75), rank(1, groups=None), gone(2, 99.1, code=75)])
    assert (found.ranks, found.candidates) == ((), (1,))


def test_a_node_that_is_gone_is_blamed_whatever_its_peers_say() -> None:
    alarm = Alarm("node", (1,), "node1 was silent for 5 s", 100.0)
    found = find_culprit(alarm, [gone(0, 99.0, code=75), rank(1, groups=None)])
    assert (found.ranks, found.nodes, found.cause, found.confidence) == ((1,), ("node1",), Cause.NODE_SILENT, "certain")


def test_any_single_rank_that_is_behind_is_found_in_any_world() -> None:
    draw = random.Random(7)
    for _ in range(200):
        world, late = draw.randrange(2, 40), 0
        late = draw.randrange(world)
        seen = [rank(number, DONE if number == late else WAITS) for number in range(world)]
        draw.shuffle(seen)
        assert find_culprit(replace(SILENT, ranks=tuple(range(world))), seen).ranks == (late,)
