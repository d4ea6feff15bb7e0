from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.heal.episodes import fold_episodes
from surefoot.observe.interventions import Segment, began_here, interventions_of, segment_at, segments_of, usable_starts
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import fold_lineage


class Book:
    """A real ledger of a run: attempts, commits, and what else was decided."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder / "ledger.jsonl", clock=SystemClock(), by="rank 0")
        self.attempt = 0
        self.head: str | None = None

    def say(self, event: Event, step: int, fields: Mapping[str, object] | None = None, *, rule: str = "", reason: str = "") -> int:
        return self.ledger.append(event, generation=1, attempt=self.attempt, step=step, rule=rule, reason=reason, fields=fields).seq

    def start(self, checkpoint: str | None = None, *, step: int = 0, **more: object) -> None:
        self.attempt += 1
        self.head = checkpoint
        self.say(Event.ATTEMPT_STARTED, step, {"checkpoint": checkpoint, "number": self.attempt, **more})
        if checkpoint is not None:
            self.say(Event.RUN_RESUMED, step, {"checkpoint": checkpoint})

    def roll_back(self, checkpoint: str, *, step: int, **more: object) -> int:
        self.attempt += 1
        self.head = checkpoint
        self.say(Event.ATTEMPT_STARTED, step, {"checkpoint": checkpoint, "number": self.attempt})
        return self.say(Event.RUN_ROLLED_BACK, step, {"checkpoint": checkpoint, **more}, rule="sustained_loss")

    def save(self, step: int) -> str:
        name = f"s{step}-a{self.attempt}"
        self.say(Event.CHECKPOINT_COMMITTED, step, {"id": name, "step": step, "attempt": self.attempt, "parent": self.head})
        self.head = name
        return name

    @property
    def entries(self) -> list[LedgerEntry]:
        return read_ledger(self.ledger.path)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return segments_of(self.entries, fold_lineage(self.entries))

    @property
    def line(self) -> list[tuple[int, int, int | None]]:
        return [(part.attempt, part.first_step, part.last_step) for part in self.segments]

    def rotation_of(self, attempt: int) -> int:
        """As the line had it when that attempt was the newest."""
        entries = [entry for entry in self.entries if entry.attempt <= attempt]
        return segments_of(entries, fold_lineage(entries))[-1].rotation

    def found(self) -> list[tuple[str, int]]:
        return [(one.kind, one.step) for one in interventions_of(self.entries, self.segments)]


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def test_a_run_that_has_not_begun_has_no_line(book: Book) -> None:
    book.say(Event.RUN_CREATED, 0)
    assert book.line == []
    assert not began_here(book.segments)


def test_the_line_of_a_run_that_was_killed_and_resumed_twice(book: Book) -> None:
    book.start()
    book.save(10)
    book.save(20)
    book.start("s20-a1", step=20)
    book.start("s20-a1", step=20)  # the second was killed before it had saved
    book.save(30)
    assert book.line == [(1, 1, 20), (3, 21, None)]
    assert began_here(book.segments)
    assert [segment.facts["number"] for segment in book.segments] == [1, 3]
    assert [getattr(segment_at(book.segments, step), "attempt", None) for step in (0, 20, 21, 99)] == [None, 1, 3, 3]


def test_what_was_given_up_is_on_no_line(book: Book) -> None:
    book.start()
    book.save(10)
    book.say(Event.UPDATE_SKIPPED, 5, rule="nonfinite")
    book.say(Event.UPDATE_SKIPPED, 15, rule="nonfinite")
    book.save(20)
    book.roll_back("s10-a1", step=10)
    book.say(Event.UPDATE_SKIPPED, 17, rule="nonfinite")
    assert book.line == [(1, 1, 10), (2, 11, None)]
    assert book.found() == [("skip", 5), ("rollback", 11), ("skip", 17)]
    assert [ref.id for ref in usable_starts(fold_lineage(book.entries), book.segments, before_step=100)] == ["s10-a1"]


def test_a_run_that_starts_over_has_nothing_of_what_was_before(book: Book) -> None:
    book.start()
    book.say(Event.UPDATE_SKIPPED, 3, rule="nonfinite")
    book.start()
    assert book.line == [(2, 1, None)]
    assert book.found() == []


def test_a_line_that_began_elsewhere_is_known_from_there_on(book: Book) -> None:
    book.say(Event.CHECKPOINT_IMPORTED, 0, {"id": "s40-a0", "step": 40, "attempt": 0})
    book.start("s40-a0", step=40)
    book.save(50)
    assert book.line == [(1, 41, None)]
    assert not began_here(book.segments)
    assert [ref.id for ref in usable_starts(fold_lineage(book.entries), book.segments, before_step=60)] == ["s50-a1", "s40-a0"]


def test_starts_are_the_newest_first_without_the_retired_and_the_damaged_last(book: Book) -> None:
    book.start()
    for step in (10, 20, 30, 40):
        book.save(step)
    book.say(Event.CHECKPOINT_RETIRED, 40, {"id": "s10-a1"})
    book.say(Event.CHECKPOINT_DAMAGED, 40, {"id": "s30-a1"})
    book.say(Event.CHECKPOINT_SUSPECTED, 40, {"id": "s20-a1"})
    lineage = fold_lineage(book.entries)
    assert [ref.id for ref in usable_starts(lineage, book.segments, before_step=41)] == ["s40-a1", "s20-a1", "s30-a1"]
    assert [ref.id for ref in usable_starts(lineage, book.segments, before_step=40)] == ["s20-a1", "s30-a1"]


def test_the_log_of_blocks_counts_whoever_took_them(book: Book) -> None:
    book.start()
    book.save(10)
    book.say(Event.BLOCK_TAKEN, 15)
    book.start("s10-a1", step=10)
    book.say(Event.BLOCK_TAKEN, 10)
    assert book.found() == [("block", 16), ("block", 11)]


def test_atoms_stay_on_other_ranks_until_the_episode_is_over_and_rates_stay_for_good(book: Book) -> None:
    book.start()
    book.save(10)
    first = book.roll_back("s10-a1", step=10, phase="rotated", lr_factor=0.5)
    book.save(20)
    book.start("s20-a2", step=20)
    book.save(30)
    book.say(Event.EPISODE_CLOSED, 30, {"episode": "e1"})
    second = book.roll_back("s30-a3", step=30, phase="replay", lr_factor=0.25)
    assert [part.rotation for part in book.segments] == [0, 1, 1, 0]
    assert [part.rates for part in book.segments] == [(), ((first, 0.5),), ((first, 0.5),), ((first, 0.5), (second, 0.25))]
    assert book.found() == [("rate", 11), ("rate", 31)]


EPISODE = {"rule": "outlier_loss", "reason": "", "onset_step": 15, "detected_step": 16, "samples": [60, 64], "to_step": 10}


def test_atoms_are_where_the_episode_has_them_when_an_attempt_begins(book: Book) -> None:
    """Through kills between any two lines, and what people do in the middle of it."""
    book.start()
    book.save(10)
    episode = f"e{book.say(Event.EPISODE_OPENED, 16, {**EPISODE, 'phase': 'replay'})}"
    expected: list[int] = []

    def begun() -> None:
        opened = fold_episodes(book.entries).open
        expected.append(opened.rotation if opened is not None else 0)

    book.roll_back("s10-a1", step=10, phase="replay", episode=episode)
    begun()
    book.roll_back("s10-a1", step=10, phase="rotated", episode=episode)
    begun()
    book.start("s10-a1", step=10)
    begun()
    book.say(Event.BLOCK_ASKED, 10, {"episode": episode})
    book.start("s10-a1", step=10)  # killed before it went back without them
    begun()
    book.roll_back("s10-a1", step=10, phase="skipped", episode=episode)
    begun()
    book.say(Event.EPISODE_CLOSED, 12, {"episode": episode})  # a person's order
    book.roll_back("s10-a1", step=10, order="order", by="ada@here")
    begun()
    told = [book.rotation_of(attempt) for attempt in range(2, book.attempt + 1)]
    assert told == expected == [0, 1, 1, 0, 0, 0]


def test_a_step_that_was_computed_again_changed_no_bit(book: Book) -> None:
    book.start()
    book.say(Event.STEP_RECHECKED, 6, {"cause": "hardware"})
    assert book.found() == [("none", 7)]
