"""A wish is met once; what it may name without a second word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, LedgerEntry, Rung
from surefoot.observe.lineage import Lineage
from surefoot.observe.wishes import Wish, named_by_step, open_wish, standing_at, why_confirm


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
