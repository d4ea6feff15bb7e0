"""A wish is met once; what it may name without a second word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, LedgerEntry, Rung
from surefoot.observe.lineage import Counters, Lineage, Look
from surefoot.observe.wishes import Wish, named_by_step, open_wish, standing_at, why_confirm, why_refuse


def entries(*told: tuple[Event, str]) -> list[LedgerEntry]:
    return [LedgerEntry(n, "", 1, 1, 0, event, "ann", "", "", {"id": name}, "", "") for n, (event, name) in enumerate(told, start=1)]


ASKED = (Event.RESUME_ASKED, "s5-a1")


@pytest.mark.parametrize(
    ("told", "wish"),
    [
        ([], None),
        ([ASKED], Wish("s5-a1", "ann")),
        ([ASKED, (Event.GENERATION_STARTED, "")], Wish("s5-a1", "ann")),  # a crash before the start was made
        ([ASKED, (Event.ATTEMPT_STARTED, "")], None),
        ([ASKED, (Event.CHECKPOINT_REJECTED, "s5-a1")], None),
        ([ASKED, (Event.CHECKPOINT_REJECTED, "s9-a1")], Wish("s5-a1", "ann")),
        ([ASKED, (Event.RESUME_ASKED, "s7-a1")], Wish("s7-a1", "ann")),
        ([ASKED, (Event.ATTEMPT_STARTED, ""), ASKED], Wish("s5-a1", "ann")),
    ],
)
def test_a_wish_stands_until_a_start_met_it(told: list[tuple[Event, str]], wish: Wish | None) -> None:
    assert open_wish(entries(*told)) == wish


def ref(step: int, *, attempt: int = 1, rung: Rung = Rung.COMMITTED, suspect: bool = False, abandoned: bool = False) -> CheckpointRef:
    return CheckpointRef(f"s{step}-a{attempt}", step, attempt, None, "", 0, rung=rung, suspect=suspect, abandoned=abandoned)


def lineage(*refs: CheckpointRef) -> Lineage:
    return Lineage(refs=refs, line=tuple(one.id for one in refs if not one.abandoned))


PLAIN, LOADABLE, PROVEN = Rung.COMMITTED, Rung.LOADABLE, Rung.PROVEN


@pytest.mark.parametrize(
    ("rungs", "free"),
    [
        ((PLAIN, PLAIN, PLAIN), (10, 20, 30)),
        ((PLAIN, LOADABLE, PLAIN), (20, 30)),
        ((PROVEN, PLAIN, LOADABLE), (10, 20, 30)),  # a proven one is the mark where there is one
        ((PLAIN, PROVEN, LOADABLE), (20, 30)),
        ((PLAIN, LOADABLE, PROVEN), (30,)),
    ],
)
def test_what_is_older_than_the_mark_needs_a_second_word(rungs: tuple[Rung, ...], free: tuple[int, ...]) -> None:
    refs = [ref(step, rung=rung) for step, rung in zip((10, 20, 30), rungs, strict=True)]
    assert tuple(one.step for one in refs if why_confirm(one, lineage(*refs)) is None) == free


def test_the_second_word_says_what_is_given_up() -> None:
    refs = [ref(10), ref(30, rung=LOADABLE)]
    assert why_confirm(refs[0], lineage(*refs)) == "s10-a1 is older than s30-a1, the newest loadable one: 20 steps would be given up"
    refs.append(ref(40))
    said = "s10-a1 is older than s30-a1, the newest loadable one, and the run stands at s40-a1: 30 steps would be given up"
    assert why_confirm(refs[0], lineage(*refs)) == said


def test_suspect_and_given_up_ones_need_it_always() -> None:
    suspect, given_up = ref(40, suspect=True), ref(50, abandoned=True)
    assert "suspect" in (why_confirm(suspect, lineage(ref(10), suspect)) or "")
    assert "given up" in (why_confirm(given_up, lineage(ref(10), given_up)) or "")


def test_an_import_needs_it_where_it_is_behind() -> None:
    mark = ref(30, rung=PROVEN)
    ahead, behind = ref(40, attempt=0, abandoned=True), ref(20, attempt=0, abandoned=True)
    assert why_confirm(ahead, lineage(mark, ahead)) is None
    assert "10 steps" in (why_confirm(behind, lineage(mark, behind)) or "")


def test_a_suspect_or_damaged_one_is_no_mark() -> None:
    first = ref(10)
    assert why_confirm(first, lineage(first, ref(20, rung=PROVEN, suspect=True))) is None
    assert why_confirm(first, lineage(first, replace(ref(20, rung=PROVEN), damaged=True))) is None


def test_a_step_names_the_present_line_first() -> None:
    line, given_up = ref(10, attempt=1), ref(10, attempt=2, abandoned=True)
    assert named_by_step(10, lineage(line, given_up)) == line
    assert named_by_step(10, lineage(ref(5), given_up)) == given_up
    assert named_by_step(11, lineage(line)) is None
    assert named_by_step(10, replace(lineage(line), retired=frozenset({line.id}))) is None


def test_going_back_to_a_step_leads_to_its_own_checkpoint_or_the_newest_good_one_before() -> None:
    damaged = replace(ref(30), damaged=True)
    of = lineage(ref(10), ref(20, suspect=True), damaged, ref(40), ref(35, attempt=2, abandoned=True))
    led = {step: found.id if (found := standing_at(step, of)) else None for step in (5, 10, 15, 20, 25, 30, 33, 35, 99)}
    assert led == {
        **{5: None, 10: "s10-a1", 15: "s10-a1", 99: "s40-a1"},
        **{20: "s20-a1", 30: "s30-a1", 35: "s35-a2"},  # named as they are; the person is asked again
        **{25: "s10-a1", 33: "s10-a1"},  # nobody is led to one that is not good
    }


def test_who_names_a_step_is_asked_again_before_more_is_given_up_than_a_save_apart() -> None:
    """Saved every 40 steps, and all between 40 and 1360 were retired."""
    refs = [ref(step) for step in range(40, 1361, 40)]
    of = replace(lineage(*refs), retired=frozenset(one.id for one in refs[1:-1]), counters=Counters(step=1372))
    assert why_confirm(refs[0], of) is None  # named by itself
    said = why_confirm(refs[0], of, asked_step=400) or ""
    assert said == (
        "no checkpoint of step 400 is left, and s40-a1, the newest good one before it, is 360 steps older: 1332 steps would be given up"
    )
    assert why_confirm(refs[-1], of, asked_step=1372) is None  # the newest, a part of an interval ago
    older = why_confirm(refs[0], of, asked_step=40) or ""
    assert "s40-a1 is older than s1360-a1, the newest committed one: 1332 steps would be given up" in older


def test_a_step_far_ahead_of_the_mark_is_asked_about_too() -> None:
    mark = ref(40, rung=PROVEN)
    assert why_confirm(mark, lineage(mark), asked_step=60) is None
    assert "is 360 steps older" in (why_confirm(mark, lineage(mark), asked_step=400) or "")


def test_nobody_goes_back_to_what_is_damaged_everywhere() -> None:
    damaged = replace(ref(30), damaged=True)
    of = replace(lineage(ref(10), damaged), looks={damaged.id: (Look(Event.CHECKPOINT_DAMAGED, "", "", "", bad_files=("a.distcp",)),)})
    assert why_refuse(damaged, of) == "s30-a1 is damaged (a.distcp), and no other tier has a copy"
    assert why_refuse(damaged, replace(of, tiers={damaged.id: ("s3://bucket/run",)})) is None  # what is damaged here is fetched from there
    assert why_refuse(ref(10), of) is None


def test_a_wish_that_the_run_could_not_meet_is_none_any_more() -> None:
    told = {"verb": "rollback", "checkpoint": "s4-a1", "by": "ada@here", "id": "order"}
    lines = [LedgerEntry(1, "", 1, 1, 0, Event.ORDER_TAKEN, "rank 0", "", "", told, "", "")]
    for order, stands in (("another", True), ("order", False)):
        refused = LedgerEntry(2, "", 1, 1, 0, Event.ORDER_REFUSED, "rank 0", "", "", {"id": order}, "", "")
        assert (open_wish([*lines, refused]) is not None) is stands
