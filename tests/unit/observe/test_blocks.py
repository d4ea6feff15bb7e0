from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core.blocking import Block, TokenSpan, head_of
from surefoot.core.clock import ManualClock, SystemClock
from surefoot.core.errors import DataError
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.records import LedgerEntry
from surefoot.observe.blocks import Blocklist, asked_fields, asked_with_fields, fold_blocks, refuse_other_log, refused_fields, taken_fields
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.ledger_tail import LedgerTail

DOCUMENT = Block("document", "ab" * 16, "mask", spans=(TokenSpan("web", 10, 20),), effective_sample=40, by="eve")
SAMPLES = Block("samples", "100:120", "skip", samples=(100, 120), effective_sample=60)
EVENTS = (Event.BLOCK_ASKED, Event.BLOCK_TAKEN, Event.BLOCK_REFUSED)


class Book:
    """A real ledger, and the short way to write to it."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder / "ledger.jsonl", clock=SystemClock(), by="eve")

    def say(self, event: Event, fields: Mapping[str, object] | None = None, *, attempt: int = 1, reason: str = "") -> int:
        return self.ledger.append(event, generation=1, attempt=attempt, step=7, reason=reason, fields=fields).seq

    def take(self, block: Block, *before: Block, asked: int | None = None, attempt: int = 1) -> None:
        fields = taken_fields(block, asked=asked, count=len(before) + 1, head=head_of((*before, block)))
        self.say(Event.BLOCK_TAKEN, fields, attempt=attempt)

    def entries(self) -> list[LedgerEntry]:
        return read_ledger(self.ledger.path)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def test_a_wish_is_open_until_it_is_taken_or_refused(book: Book) -> None:
    first, second = (book.say(Event.BLOCK_ASKED, asked_fields(block)) for block in (DOCUMENT, SAMPLES))
    log = fold_blocks(book.entries())
    assert [(asked.seq, asked.by, asked.block) for asked in log.open] == [
        (first, "eve", DOCUMENT.as_json() | {"spans": [{"source": "web", "start": 10, "end": 20}]}),
        (second, "eve", SAMPLES.as_json() | {"spans": []}),
    ]
    assert (log.count, log.head) == (0, ZERO_HASH)
    book.say(Event.BLOCK_REFUSED, refused_fields(asked=second, block=SAMPLES.as_json()), reason="no such sample")
    book.take(DOCUMENT, asked=first, attempt=3)
    log = fold_blocks(book.entries())
    assert not log.open
    assert [(refused.asked, refused.reason) for refused in log.refused] == [(second, "no such sample")]
    assert [(taken.block, taken.asked, taken.attempt, taken.step) for taken in log.taken] == [(DOCUMENT, first, 3, 7)]
    assert (log.count, log.head) == (1, head_of([DOCUMENT]))


def test_what_could_not_be_gone_back_for_is_not_left_out_either(book: Book) -> None:
    for order in ("one", "two"):
        book.say(Event.ORDER_TAKEN, {"id": order, "verb": "rollback", **asked_with_fields([SAMPLES, DOCUMENT])})
    kept = book.say(Event.BLOCK_ASKED, asked_fields(DOCUMENT))
    book.say(Event.ORDER_REFUSED, {"id": "one", "verb": "rollback"})
    assert [(asked.order, asked.item) for asked in fold_blocks(book.entries()).open] == [("two", 0), ("two", 1), ("", 0)]
    assert fold_blocks(book.entries()).open[-1].seq == kept


@pytest.mark.parametrize("event", [Event.RESUME_ASKED, Event.ORDER_TAKEN])
def test_who_goes_back_asks_in_the_same_line_and_each_of_it_is_answered(event: Event, book: Book) -> None:
    asked = book.say(event, {"id": "s4-a1", "verb": "rollback", **asked_with_fields([SAMPLES, DOCUMENT])})
    assert [(wish.seq, wish.item, wish.block["name"]) for wish in fold_blocks(book.entries()).open] == [
        (asked, 0, SAMPLES.name),
        (asked, 1, DOCUMENT.name),
    ]
    book.say(Event.BLOCK_REFUSED, refused_fields(asked=asked, block=SAMPLES.as_json()))
    assert [wish.item for wish in fold_blocks(book.entries()).open] == [1]
    book.say(Event.BLOCK_TAKEN, taken_fields(DOCUMENT, asked=asked, count=1, head=head_of([DOCUMENT]), item=1))
    assert not fold_blocks(book.entries()).open
    book.say(event, {"id": "s4-a1", **asked_with_fields([])})
    assert not fold_blocks(book.entries()).open


def test_folding_in_parts_gives_the_same_as_folding_at_once(book: Book) -> None:
    asked = book.say(Event.BLOCK_ASKED, asked_fields(DOCUMENT))
    book.take(DOCUMENT, asked=asked)
    book.take(SAMPLES, DOCUMENT)
    entries = book.entries()
    in_parts = Blocklist()
    for entry in entries:
        in_parts = fold_blocks([entry], onto=in_parts)
    assert in_parts == fold_blocks(entries)
    assert in_parts.blocks == (DOCUMENT, SAMPLES)


def test_an_entry_that_does_not_continue_the_chain_is_named(book: Book) -> None:
    book.take(DOCUMENT)
    book.take(SAMPLES, replace(DOCUMENT, effective_sample=41))
    with pytest.raises(DataError, match="ledger entry 2: entry 2 of the blocklist does not follow"):
        fold_blocks(book.entries())


def cursor(count: int, head: str) -> dict[str, object]:
    return {"next_sample": 200, "blocklist": {"count": count, "head": head}}


def test_a_cursor_must_hold_the_beginning_of_the_log(book: Book) -> None:
    book.take(DOCUMENT)
    book.take(SAMPLES, DOCUMENT)
    log = fold_blocks(book.entries())
    for held in (cursor(0, ZERO_HASH), cursor(1, head_of([DOCUMENT])), cursor(2, head_of([DOCUMENT, SAMPLES])), {"next_sample": 3}):
        refuse_other_log(log, cursor=held, checkpoint="s5-a1")
    with pytest.raises(DataError, match=r"s5-a1: it was made with 3 entries of the blocklist, the ledger has 2"):
        refuse_other_log(log, cursor=cursor(3, "ab" * 32), checkpoint="s5-a1")
    for wrong in (cursor(1, head_of([SAMPLES])), cursor(0, "ab" * 32), {"blocklist": {"count": "1"}}):
        with pytest.raises(DataError, match="are not those that it was made with") as raised:
            refuse_other_log(log, cursor=wrong, checkpoint="s5-a1")
        assert raised.value.exit_code == 4


def test_the_tail_tells_each_entry_once_and_reads_only_what_was_added(book: Book) -> None:
    tail = LedgerTail(book.ledger.path, events=EVENTS, clock=ManualClock(), look_every_s=0.0)
    assert tail.news() == []  # there is no file yet
    book.say(Event.RUN_CREATED, {"note": '{"event":"block.asked"}'})
    asked = book.say(Event.BLOCK_ASKED, asked_fields(DOCUMENT))
    assert [entry.seq for entry in tail.news()] == [asked]
    assert tail.news() == []
    book.say(Event.RUN_LEFT)
    with book.ledger.path.open("ab") as file:
        file.write(b'{"seq": 4, "event":"block.as')  # torn: the next append moves it
    assert tail.news() == []
    again = book.say(Event.BLOCK_ASKED, asked_fields(SAMPLES))
    assert [entry.seq for entry in tail.news()] == [again]


def test_the_tail_looks_no_more_often_than_it_may(book: Book) -> None:
    clock = ManualClock()
    tail = LedgerTail(book.ledger.path, events=EVENTS, clock=clock, look_every_s=1.0)
    assert tail.news() == []
    asked = book.say(Event.BLOCK_ASKED, asked_fields(DOCUMENT))
    clock.now_s = 0.9
    assert tail.news() == []
    assert [entry.seq for entry in tail.news(now=True)] == [asked]
    later = book.say(Event.BLOCK_ASKED, asked_fields(DOCUMENT))
    clock.now_s = 2.0
    assert [entry.seq for entry in tail.news()] == [later]
