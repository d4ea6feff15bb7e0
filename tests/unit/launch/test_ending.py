"""How a generation ends and who is blamed: one test per branch."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from surefoot.launch.ending import Limits, Seen, culprit, end_of, exit_text
from surefoot.launch.wire import RankExit

LIMITS = Limits(init_s=100.0, grace_s=60.0, end_s=300.0, settle_s=0.5)
RUNNING = Seen(
    now_s=10.0,
    ranks=(0, 1),
    exits=(),
    complained=frozenset(),
    started_s=0.0,
    all_stepping=True,
    nursery_gone=False,
    nursery_silent_s=0.0,
    leave_asked_s=None,
    kill_asked=False,
)


def left(rank: int, code: int, *, at_s: float = 9.9) -> RankExit:
    return RankExit(generation=1, rank=rank, pid=100 + rank, exit_code=code, signal=None, mono_s=at_s)


def killed(rank: int, number: int = signal.SIGKILL, *, at_s: float = 9.9) -> RankExit:
    return RankExit(generation=1, rank=rank, pid=100 + rank, exit_code=None, signal=number, mono_s=at_s)


def test_goes_on_while_nothing_happens() -> None:
    assert end_of(RUNNING, LIMITS) is None


def test_finished_when_every_rank_is_done() -> None:
    ending = end_of(replace(RUNNING, exits=(left(0, 0), left(1, 0))), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.in_good_order) == ("finished", True)


def test_one_rank_done_is_waited_for() -> None:
    assert end_of(replace(RUNNING, exits=(left(0, 0),)), LIMITS) is None


@pytest.mark.parametrize("asked_s", [None, 9.0])
def test_left_when_all_leave_without_a_complaint(asked_s: float | None) -> None:
    ending = end_of(replace(RUNNING, exits=(left(0, 75), left(1, 75)), leave_asked_s=asked_s), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.in_good_order) == ("left", True)


@pytest.mark.parametrize("codes", [(6, 6), (0, 7), (75, 93)])
def test_an_agreed_stop_is_in_good_order(codes: tuple[int, int]) -> None:
    ending = end_of(replace(RUNNING, exits=(left(0, codes[0]), left(1, codes[1]))), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.in_good_order) == ("failed", True)
    assert ending.culprit is not None
    assert ending.culprit.exit_code == codes[1]


def test_who_stays_when_the_group_leaves_is_not_waited_for_without_end() -> None:
    seen = replace(RUNNING, exits=(left(0, 75),))
    assert end_of(replace(seen, now_s=69.8), LIMITS) is None
    ending = end_of(replace(seen, now_s=70.0), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.culprit, ending.in_good_order) == ("failed", left(0, 75), False)


def test_who_hangs_after_the_last_step_is_not_waited_for_without_end() -> None:
    """Nobody says which of the late ones is to blame."""
    seen = replace(RUNNING, ranks=(0, 1, 2), exits=(left(1, 0),))
    assert end_of(replace(seen, now_s=309.8), LIMITS) is None
    ending = end_of(replace(seen, now_s=310.0), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.what, ending.culprit, ending.in_good_order) == ("failed", "rank", None, False)
    assert ending.reason == "rank 1 is done, but 300 s later not rank 0, 2"


def test_the_end_is_counted_from_the_first_that_is_done() -> None:
    seen = replace(RUNNING, ranks=(0, 1, 2), exits=(left(1, 0), left(2, 0, at_s=300.0)))
    assert end_of(replace(seen, now_s=309.8), LIMITS) is None
    assert end_of(replace(seen, now_s=310.0), LIMITS) is not None


def test_who_is_asked_to_leave_has_the_grace_and_no_more() -> None:
    seen = replace(RUNNING, exits=(left(1, 0),), leave_asked_s=1.0, now_s=61.0)
    ending = end_of(seen, LIMITS)
    assert ending is not None
    assert ending.kind == "left"


def test_a_complaint_makes_75_a_lost_peer() -> None:
    ending = end_of(replace(RUNNING, exits=(left(0, 75), left(1, 75)), complained=frozenset({0, 1})), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.what) == ("failed", "rank")


def test_a_signal_is_acted_on_at_once() -> None:
    ending = end_of(replace(RUNNING, exits=(killed(1),)), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.what, ending.culprit, ending.in_good_order) == ("failed", "rank", killed(1), False)
    assert ending.reason == "rank 1 was killed by SIGKILL"


def test_an_error_exit_waits_for_the_others_to_say_why() -> None:
    seen = replace(RUNNING, exits=(left(0, 1),))
    assert end_of(seen, LIMITS) is None
    ending = end_of(replace(seen, now_s=10.5), LIMITS)
    assert ending is not None
    assert ending.reason == "rank 0 left with exit code 1"


def test_the_victims_complaint_is_not_the_culprit() -> None:
    seen = replace(RUNNING, exits=(left(0, 75, at_s=9.95), left(1, 4, at_s=10.2)), complained=frozenset({0, 1}))
    ending = end_of(seen, LIMITS)
    assert ending is not None
    assert ending.culprit == left(1, 4, at_s=10.2)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(-9, "the nursery was killed by SIGKILL"), (1, "the nursery left with exit code 1"), (None, "the nursery is gone")],
)
def test_nursery_gone(code: int | None, reason: str) -> None:
    ending = end_of(replace(RUNNING, nursery_gone=True, nursery_code=code), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.what, ending.reason, ending.nursery_code) == ("failed", "nursery", reason, code)


def test_silent_nursery() -> None:
    assert end_of(replace(RUNNING, nursery_silent_s=0.4), LIMITS) is None
    ending = end_of(replace(RUNNING, nursery_silent_s=0.5), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.what) == ("failed", "nursery")


def test_init_deadline() -> None:
    seen = replace(RUNNING, all_stepping=False, now_s=99.9)
    assert end_of(seen, LIMITS) is None
    ending = end_of(replace(seen, now_s=100.0), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.what) == ("failed", "init-deadline")


def test_no_init_deadline_for_ranks_that_step() -> None:
    assert end_of(replace(RUNNING, now_s=1e6), LIMITS) is None


def test_grace() -> None:
    seen = replace(RUNNING, leave_asked_s=1.0, all_stepping=False, now_s=60.9)
    assert end_of(seen, LIMITS) is None
    ending = end_of(replace(seen, now_s=61.0), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.in_good_order) == ("left", False)


def test_second_interrupt_kills_at_once() -> None:
    ending = end_of(replace(RUNNING, leave_asked_s=9.9, kill_asked=True), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.in_good_order) == ("left", False)


@pytest.mark.parametrize("seen", [replace(RUNNING, exits=(killed(0),)), replace(RUNNING, nursery_gone=True)])
def test_a_loss_while_leaving_is_no_restart(seen: Seen) -> None:
    ending = end_of(replace(seen, leave_asked_s=9.0), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.in_good_order) == ("left", False)


def test_what_a_rank_says_about_the_run_is_heard_while_leaving() -> None:
    ending = end_of(replace(RUNNING, exits=(left(0, 5), left(1, 75)), leave_asked_s=9.0), LIMITS)
    assert ending is not None
    assert (ending.kind, ending.what) == ("failed", "rank")


def test_culprit_is_the_earliest() -> None:
    assert culprit([killed(1, at_s=1.0), killed(0, at_s=2.0)]).rank == 1
    assert culprit([left(0, 1, at_s=1.0), killed(1, signal.SIGABRT, at_s=2.0)]).rank == 0


def test_culprit_of_one_moment_is_the_killed_one() -> None:
    assert culprit([left(0, 1, at_s=1.0), killed(1, at_s=1.05)]).rank == 1


def test_culprit_of_one_moment_is_the_one_that_says_why() -> None:
    assert culprit([left(0, 1, at_s=1.0), left(1, 4, at_s=1.05)]).rank == 1


def test_unnamed_signal() -> None:
    assert exit_text(killed(3, 40)) == "rank 3 was killed by signal 40"
