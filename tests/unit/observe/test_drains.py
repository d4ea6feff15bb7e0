"""Drains are read off the ledger once, isolations are folded from it."""

from __future__ import annotations

from pathlib import Path

from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.drains import DrainTail, num_nodes_of, why_no_drain
from surefoot.observe.isolations import past_isolations
from surefoot.observe.ledger import Ledger


def entry(seq: int, event: Event, fields: dict[str, object], *, time_utc: str = "2026-01-01T00:00:00Z") -> LedgerEntry:
    return LedgerEntry(seq, time_utc, 1, 1, 0, event.value, "agent", "", "", fields, "", "")


def test_a_drain_that_was_taken_is_told_once_and_other_orders_are_none(tmp_path: Path) -> None:
    clock = ManualClock()
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=clock, by="rank 0")

    def take(verb: str, **fields: str) -> None:
        taken = {"id": f"{verb}-1", "verb": verb, "by": "ada@here", **fields}
        ledger.append(Event.ORDER_TAKEN, generation=1, attempt=1, step=5, rule="control", reason="fans", fields=taken)

    take("drain", node="n0")
    tail = DrainTail(tmp_path, clock=clock, look_every_s=0.5)
    assert tail.news() == []
    take("save")
    take("drain", node="n1")
    clock.now_s = 1.0
    (drain,) = tail.news()
    assert (drain.node, drain.by, drain.reason, drain.order, drain.generation) == ("n1", "ada@here", "fans", "drain-1", 1)
    clock.now_s = 2.0
    assert tail.news() == []


def test_the_newest_generation_says_how_many_nodes_there_are() -> None:
    one, three = (entry(n, Event.GENERATION_STARTED, {"num_nodes": n}) for n in (1, 3))
    assert num_nodes_of([one, three]) == 3
    assert num_nodes_of([three, one]) == num_nodes_of([]) == 1
    assert why_no_drain([one, three]) is None
    assert "nothing would be left" in str(why_no_drain([three, one]))


def test_a_node_is_out_until_it_was_readmitted() -> None:
    ledger = [
        entry(1, Event.NODE_ISOLATED, {"node": "n1"}),
        entry(2, Event.NODE_ISOLATED, {"node": "n2"}, time_utc="2026-01-01T00:30:00Z"),
        entry(3, Event.NODE_READMITTED, {"node": "n1"}, time_utc="2026-01-01T00:40:00Z"),
    ]
    told = {each.node: (each.age_s, each.is_out) for each in past_isolations(ledger, now_utc="2026-01-01T01:00:00Z")}
    assert told == {"n1": (3600.0, False), "n2": (1800.0, True)}
    again = [*ledger, entry(4, Event.NODE_ISOLATED, {"node": "n1"}, time_utc="2026-01-01T00:50:00Z")]
    assert next(each for each in past_isolations(again, now_utc="2026-01-01T01:00:00Z") if each.node == "n1").is_out
    assert all(each.age_s == 0.0 for each in past_isolations(ledger, now_utc="2025-01-01T00:00:00Z"))
