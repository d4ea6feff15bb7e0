"""What a run answers to an order: a branch each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.blocking import Block
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.guard.order_rules import Refusal, Standing, answer, answered, told_of
from surefoot.observe.control import NoOrder, Order

RANGE = Block("samples", "40:48", "skip", samples=(40, 48))


def entry(seq: int, event: Event, fields: dict[str, Any], *, step: int = 0) -> LedgerEntry:
    return LedgerEntry(seq, "", 1, 1, step, event.value, "rank 0", "", "", fields, "", "")


def commit(seq: int, step: int, parent: str | None) -> LedgerEntry:
    return entry(seq, Event.CHECKPOINT_COMMITTED, {"id": f"s{step}-a1", "step": step, "attempt": 1, "parent": parent}, step=step)


LEDGER = [
    entry(1, Event.ATTEMPT_STARTED, {"checkpoint": None}),
    commit(2, 10, None),
    commit(3, 20, "s10-a1"),
    entry(4, Event.CHECKPOINT_LOADED, {"id": "s20-a1"}),
    entry(5, Event.EPISODE_OPENED, {}, step=22),
]


def ask(
    verb: str, *, step: int = 25, is_paused: bool = False, job: str = "job", more: Sequence[LedgerEntry] = (), **fields: object
) -> dict[str, Any] | Refusal:
    standing = Standing(Path("run"), "job", step, 30, is_paused, 600.0, [*LEDGER, *more])
    return answer(Order(verb, "ada@here", job, "", "why", fields), standing)


def refused(told: dict[str, Any] | Refusal, words: str) -> bool:
    return isinstance(told, Refusal) and words in told


def test_a_line_that_is_no_order_is_refused_by_what_is_wrong_with_it() -> None:
    told = answer(NoOrder("line-1", "it is not JSON"), Standing(Path("run"), "job", 1, 30, False, 600.0, []))
    assert refused(told, "no order: it is not JSON")
    assert told_of(NoOrder("line-1", ""), {}) == {"id": "line-1"}


@pytest.mark.parametrize("verb", ["stop", "save", "pause", "resume", "rollback"])
def test_an_order_to_another_job_is_refused(verb: str) -> None:
    assert refused(ask(verb, job="other", to=10, confirmed=True), "given to another job (other, this is job)")


@pytest.mark.parametrize("verb", ["stop", "save", "pause"])
def test_a_run_at_its_end_finishes(verb: str) -> None:
    assert not isinstance(ask(verb), Refusal)
    assert refused(ask(verb, step=30), "has made its last step, 30")


@pytest.mark.parametrize(("limit_s", "kept_s"), [(None, 600.0), (0, 0.0), (2.5, 2.5)])
def test_a_pause_is_as_long_as_it_says(limit_s: float | None, kept_s: float) -> None:
    assert ask("pause", limit_s=limit_s) == {"limit_s": kept_s, "prolongs": False}
    assert ask("pause", is_paused=True, limit_s=limit_s) == {"limit_s": kept_s, "prolongs": True}


@pytest.mark.parametrize("limit_s", [-1, "5", True, 1e9, [1]])
def test_a_pause_of_no_length_is_refused(limit_s: object) -> None:
    assert refused(ask("pause", limit_s=limit_s), "it takes 0 to 2592000")


def test_only_who_stands_still_goes_on() -> None:
    assert refused(ask("resume"), "it trains, at step 25")
    assert ask("resume", is_paused=True) == {}
    assert ask("resume", is_paused=True, incident="e5") == {"incident": "e5"}
    assert refused(ask("resume", is_paused=True, incident="e6"), "no incident e6; the newest are e5")
    assert refused(ask("resume", is_paused=True, incident=5), "no incident 5")


def test_going_back_leads_to_a_checkpoint_or_says_why_not() -> None:
    told = ask("rollback", to=24, blocks=[RANGE.as_json()])
    assert told == {"to": 24, "checkpoint": "s20-a1", "checkpoint_step": 20, "left_out": ["samples 40:48"]}
    assert refused(ask("rollback", to=12), "s10-a1 is older than s20-a1, the newest loadable one")
    confirmed = ask("rollback", to=12, confirmed=True)
    assert not isinstance(confirmed, Refusal)
    assert confirmed["checkpoint"] == "s10-a1"
    assert refused(ask("rollback", to=9, confirmed=True), "no checkpoint of step 9 or before is left; there are s10-a1, s20-a1")
    assert refused(ask("rollback", to=26, confirmed=True), "step 26 is ahead: the run stands at step 25")


def test_nobody_goes_back_to_what_is_damaged_even_when_they_confirm_it() -> None:
    damaged = entry(6, Event.CHECKPOINT_DAMAGED, {"id": "s20-a1", "problems": [{"file": "a.distcp"}]})
    told = ask("rollback", to=20, confirmed=True, more=[damaged])
    assert refused(told, "s20-a1 is damaged (a.distcp), and no other tier has a copy; a step before 20 leads to an older one")
    older = ask("rollback", to=19, confirmed=True, more=[damaged])
    assert not isinstance(older, Refusal)
    assert older["checkpoint"] == "s10-a1"


def test_going_back_far_from_the_step_that_was_named_is_asked_about_from_where_the_run_stands() -> None:
    assert refused(ask("rollback", to=24, more=[entry(6, Event.CHECKPOINT_DAMAGED, {"id": "s20-a1"})]), "15 steps would be given up")


@pytest.mark.parametrize("to", [None, -1, "10", True, 1.5])
def test_what_is_no_step_is_refused(to: object) -> None:
    assert refused(ask("rollback", to=to, confirmed=True), "is no step to go back to")


@pytest.mark.parametrize("blocks", [5, ["x"], [{}], [RANGE.as_json() | {"samples": [8, 4]}]])
def test_what_cannot_be_left_out_is_refused_before_anything_is_done(blocks: object) -> None:
    assert isinstance(ask("rollback", to=20, blocks=blocks), Refusal)


def test_an_answer_is_known_by_id_whatever_it_was() -> None:
    told = [entry(1, Event.ORDER_TAKEN, {"id": "a"}), entry(2, Event.ORDER_REFUSED, {"id": "b"}), entry(3, Event.BLOCK_TAKEN, {"id": "c"})]
    assert answered(told) == {"a", "b"}


def test_a_node_is_drained_where_others_are_left() -> None:
    two = entry(9, Event.GENERATION_STARTED, {"world_size": 4, "num_nodes": 2})
    one = entry(10, Event.GENERATION_STARTED, {"world_size": 2, "num_nodes": 1})
    assert ask("drain", more=[two], node="n1") == {"node": "n1"}
    assert refused(ask("drain", more=[two, one], node="n1"), "nothing would be left")
    assert refused(ask("drain", node="n1"), "nothing would be left")


@pytest.mark.parametrize("node", [None, "", 7, "a\nb", "x" * 254])
def test_what_is_no_name_of_a_node_is_refused(node: object) -> None:
    two = entry(9, Event.GENERATION_STARTED, {"world_size": 4, "num_nodes": 2})
    assert refused(ask("drain", more=[two], node=node), "is no name of a node")
