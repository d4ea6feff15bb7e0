"""The comparison of a replayed step, and what follows from a difference: branch by branch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.guard.replay import (
    Difference,
    FallBack,
    Figures,
    GoOn,
    Mode,
    Recorded,
    Replay,
    StopHere,
    advance,
    after_difference,
    compare,
    from_json,
    relative_difference,
    to_json,
)

SEEN = Figures(step=11, loss=2.5, grad_norm=0.75, next_sample=44, num_live_tokens=120)
NEXT_LOSS = math.nextafter(2.5, 3.0)


def recorded(mode: Mode, *, step: int = 11, loss: float = 2.5, grad_norm: float = 0.75, next_sample: int = 44) -> Recorded:
    return Recorded(Figures(step, loss, grad_norm, next_sample, 120), 1, mode)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_figures_agree(mode: Mode) -> None:
    assert compare(recorded(mode), SEEN, checkpoint="c", tolerance=0.0) is None


@pytest.mark.parametrize(
    ("was", "what", "within"),
    [
        (recorded(Mode.BITS, loss=NEXT_LOSS), "loss", True),
        (recorded(Mode.BITS, loss=3.5), "loss", False),
        (recorded(Mode.BITS, grad_norm=math.nextafter(0.75, 1.0)), "grad_norm", True),
        (recorded(Mode.BITS, loss=math.nan), "loss", False),
        (recorded(Mode.BITS, next_sample=40), "samples", False),
        (recorded(Mode.TOLERANCE, next_sample=40), "samples", False),
        (recorded(Mode.TOLERANCE, loss=2.6), "loss", False),
        (recorded(Mode.TOLERANCE, loss=math.inf), "loss", False),
    ],
)
def test_what_differs_is_named(was: Recorded, what: str, within: bool) -> None:
    difference = compare(was, SEEN, checkpoint="c", tolerance=0.01)
    assert difference is not None
    assert (difference.what, difference.within, difference.step) == (what, within, 11)
    assert "step 11: attempt 1 recorded" in difference.reason


@pytest.mark.parametrize(
    "was",
    [
        recorded(Mode.TOLERANCE, loss=2.51),
        recorded(Mode.TOLERANCE, grad_norm=0.9),  # a norm moves more than a loss: it is no figure for a tolerance
        recorded(Mode.SHOWN, loss=9.0, next_sample=1),
    ],
)
def test_what_may_differ_does(was: Recorded) -> None:
    assert compare(was, SEEN, checkpoint="c", tolerance=0.01) is None


def test_two_losses_that_are_not_a_number_are_the_same() -> None:
    assert compare(recorded(Mode.BITS, loss=math.nan), replace(SEEN, loss=math.nan), checkpoint="c", tolerance=0.0) is None


def test_a_sign_of_zero_is_a_bit() -> None:
    assert compare(recorded(Mode.BITS, grad_norm=0.0), replace(SEEN, grad_norm=-0.0), checkpoint="c", tolerance=1.0) is not None


def test_relative_differences() -> None:
    assert relative_difference(2.0, 2.5) == 0.25
    assert relative_difference(math.nan, math.nan) == 0.0
    assert relative_difference(1.0, math.inf) == math.inf


def test_a_replay_is_over_after_its_last_step() -> None:
    replay = Replay("c", 10, (recorded(Mode.BITS), recorded(Mode.TOLERANCE, step=12, loss=2.5)), tolerance=0.1)
    assert not replay.is_over
    replay, difference = advance(replay, SEEN)
    assert (replay.num_done, difference) == (1, None)
    replay, difference = advance(replay, replace(SEEN, step=12, loss=2.6))
    assert (replay.is_over, difference, replay.mode) == (True, None, Mode.TOLERANCE)
    assert replay.largest == pytest.approx(0.04)
    assert advance(replay, SEEN) == (replay, None)


def test_a_replay_of_nothing_is_over_at_once() -> None:
    replay = Replay("c", 10, (), tolerance=0.1)
    assert (replay.is_over, replay.mode) == (True, Mode.SHOWN)


@given(loss=st.floats(), grad_norm=st.floats(), step=st.integers(1, 10**9))
def test_records_travel_with_their_bits(loss: float, grad_norm: float, step: int) -> None:
    was = recorded(Mode.BITS, step=step, loss=loss, grad_norm=grad_norm)
    (back,) = from_json(to_json([was]))
    assert compare(back, was.figures, checkpoint="c", tolerance=0.0) is None
    assert (back.attempt, back.mode, back.figures.step) == (1, Mode.BITS, step)


# --- What follows ---


def differs(checkpoint: str, *, within: bool = False, step: int = 12, seen: str = "") -> Difference:
    return Difference(checkpoint, step, "loss", f"{checkpoint} differs", within, 0.0, seen or f"bits of {checkpoint}")


def test_the_first_difference_falls_back_one_generation() -> None:
    decision = after_difference(differs("s30-a1"), before=[], older=["s20-a1", "s10-a1"])
    assert decision == FallBack("s20-a1", "s30-a1 differs")


def test_a_checkpoint_that_differed_before_is_not_tried_again() -> None:
    decision = after_difference(differs("s30-a1"), before=[differs("s20-a1", within=True)], older=["s20-a1", "s10-a1"])
    assert decision == FallBack("s10-a1", "s30-a1 differs")


def test_two_within_the_tolerance_say_that_the_machine_does_not_repeat_itself() -> None:
    decision = after_difference(differs("s20-a1", within=True), before=[differs("s30-a1", within=True)], older=["s10-a1"])
    assert isinstance(decision, GoOn)
    assert (decision.rule, decision.checkpoint) == ("not-reproduced", "s30-a1")


def test_a_newest_one_beyond_the_tolerance_is_not_gone_back_to() -> None:
    before = [differs("s30-a1"), differs("s20-a1", within=True)]
    decision = after_difference(differs("s10-a1", within=True), before=before, older=[])
    assert isinstance(decision, GoOn)
    assert decision.checkpoint == "s20-a1"


def test_the_only_one_goes_on_in_place_within_the_tolerance() -> None:
    decision = after_difference(differs("s10-a1", within=True), before=[], older=[])
    assert isinstance(decision, GoOn)
    assert (decision.rule, decision.checkpoint) == ("not-reproduced", None)


def test_the_only_one_stops_beyond_the_tolerance() -> None:
    assert isinstance(after_difference(differs("s10-a1"), before=[], older=[]), StopHere)


def test_all_beyond_the_tolerance_stop() -> None:
    decision = after_difference(differs("s10-a1"), before=[differs("s30-a1"), differs("s20-a1")], older=[])
    assert isinstance(decision, StopHere)
    assert "no checkpoint repeats" in decision.reason


def test_two_that_agree_with_each_other_outvote_the_record() -> None:
    before = [differs("s30-a1", step=33, seen="abc")]
    decision = after_difference(differs("s20-a1", step=33, seen="abc"), before=before, older=["s10-a1"])
    assert isinstance(decision, GoOn)
    assert (decision.rule, decision.checkpoint) == ("outvoted", None)
    assert isinstance(after_difference(differs("s20-a1", step=32, seen="abc"), before=before, older=["s10-a1"]), FallBack)


def test_what_a_person_asked_for_is_never_replaced_by_another() -> None:
    decision = after_difference(differs("s10-a1", within=True), before=[], older=["s5-a1"], asked_for=True)
    assert isinstance(decision, StopHere)
    assert "was asked for by name" in decision.reason


@given(withins=st.lists(st.booleans(), min_size=1, max_size=6))
def test_there_is_an_end(withins: list[bool]) -> None:
    """Whatever differs in whatever way, the rounds are at most as many as there are checkpoints."""
    names = [f"s{10 * (len(withins) - index)}-a1" for index in range(len(withins))]
    before: list[Difference] = []
    current = names[0]
    for _ in names:
        now = differs(current, within=withins[names.index(current)])
        decision = after_difference(now, before=before, older=names[names.index(current) + 1 :])
        before.append(now)
        if not isinstance(decision, FallBack):
            return
        current = decision.checkpoint
    pytest.fail("it went round")
