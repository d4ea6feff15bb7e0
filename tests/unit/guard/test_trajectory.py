"""Which recorded steps count for which checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from surefoot.core.events import Event
from surefoot.core.layouts import layout_facts, topology
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import ParallelSection
from surefoot.guard.replay import Mode
from surefoot.guard.trajectory import Facts, facts_of, fold_history, recorded_after, stage_changes
from surefoot.observe.lineage import fold_lineage

HERE = {"environment": {"torch": "2", "world_size": 2}, "config_hashes": {"train": "t"}, "data_hash": "d", "topology": {"dp_shard": 1}}
ELSEWHERE = {**HERE, "environment": {"torch": "3", "world_size": 2}}
OTHER_CONFIG = {**HERE, "config_hashes": {"train": "u"}}


@dataclass
class Story:
    """A ledger and the rows beside it, told attempt by attempt."""

    entries: list[LedgerEntry] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    attempt: int = 0
    step: int = 0
    head: str | None = None

    def tell(self, event: Event, *, rule: str = "", reason: str = "", **fields: object) -> Story:
        seq = len(self.entries) + 1
        self.entries.append(LedgerEntry(seq, "", 1, self.attempt, self.step, event, "rank 0", rule, reason, fields, "", ""))
        return self

    def start(self, base: str | None = None, *, facts: dict[str, Any] = HERE, asked_by: str = "") -> Story:
        self.attempt += 1
        self.head, self.step = base, int(base[1:].partition("-")[0]) if base else 0
        return self.tell(Event.ATTEMPT_STARTED, checkpoint=base, asked_by=asked_by, **facts)

    def run(self, to: int, *, save_at: tuple[int, ...] = ()) -> Story:
        for step in range(self.step + 1, to + 1):
            self.step = step
            figures = {"loss": 100.0 * self.attempt + self.step, "grad_norm": 1.0, "next_sample": 4 * self.step, "num_live_tokens": 9}
            self.rows.append({"step": self.step, "attempt": self.attempt, **figures})
            if self.step in save_at:
                name = f"s{self.step}-a{self.attempt}"
                self.tell(Event.CHECKPOINT_COMMITTED, id=name, step=self.step, attempt=self.attempt, parent=self.head)
                self.head = name
        return self

    def found(self, checkpoint: str, *, now: dict[str, Any] = HERE, max_steps: int = 8) -> list[tuple[int, int, Mode]]:
        """(step, attempt, mode) of what counts for a resume from `checkpoint`."""
        lineage = fold_lineage(self.entries)
        ref = lineage.ref(checkpoint)
        assert ref is not None
        history = fold_history(self.entries, refs=lineage.refs)
        changes = stage_changes(self.entries)
        found = recorded_after(ref, history=history, rows=self.rows, now=facts_of(now), max_steps=max_steps, changes=changes)
        return [(recorded.figures.step, recorded.attempt, recorded.mode) for recorded in found]


def test_the_steps_that_were_lost_with_the_last_attempt_count() -> None:
    story = Story().start().run(13, save_at=(5, 10))
    assert story.found("s10-a1") == [(11, 1, Mode.BITS), (12, 1, Mode.BITS), (13, 1, Mode.BITS)]
    assert [step for step, *_ in story.found("s5-a1")] == [6, 7, 8, 9, 10, 11, 12, 13]
    assert [step for step, *_ in story.found("s5-a1", max_steps=2)] == [6, 7]


def test_nothing_after_the_newest_means_nothing_to_compare() -> None:
    assert Story().start().run(10, save_at=(10,)).found("s10-a1") == []


STAGED = {**HERE, "config_hashes": {"train": "t", "stage": "s"}}


@pytest.mark.parametrize(("sample", "steps"), [(400, [11, 12, 13, 14]), (54, [11, 12, 13]), (52, [11, 12]), (51, [11, 12]), (40, [])])
def test_a_changed_stage_takes_away_the_steps_from_its_edge_on_and_no_others(sample: int, steps: list[int]) -> None:
    """Step n ends before sample 4 n. One that ends at the edge may have been cut short by it."""
    story = Story().start().run(14, save_at=(10,)).tell(Event.STAGE_CHANGED, effective_sample=sample)
    assert story.found("s10-a1", now=STAGED) == [(step, 1, Mode.BITS) for step in steps]


def test_what_was_trained_after_the_change_is_compared_again() -> None:
    story = Story().start().run(14, save_at=(10,)).tell(Event.STAGE_CHANGED, effective_sample=44)
    story.start("s10-a1", facts=STAGED).run(13)
    assert [(step, attempt) for step, attempt, _ in story.found("s10-a1", now=STAGED)] == [(11, 2), (12, 2), (13, 2)]


def test_a_gap_ends_what_counts() -> None:
    story = Story().start().run(14, save_at=(10,))
    story.rows = [row for row in story.rows if row["step"] != 12]
    assert [step for step, *_ in story.found("s10-a1")] == [11]


def test_the_oldest_attempt_counts_for_a_younger_one_may_have_been_killed_in_its_replay() -> None:
    story = Story().start().run(13, save_at=(10,)).start("s10-a1").run(11).start("s10-a1").run(15)
    assert [attempt for _, attempt, _ in story.found("s10-a1")] == [1, 1, 1, 3, 3]


def test_a_checkpoint_of_a_replay_is_compared_with_what_the_attempt_before_recorded() -> None:
    story = Story().start().run(18, save_at=(10,)).start("s10-a1").run(12, save_at=(12,))
    assert story.found("s12-a2") == [(step, 1, Mode.BITS) for step in range(13, 19)]


def test_a_fresh_start_repeats_a_fresh_start() -> None:
    story = Story().start().run(8).start().run(5, save_at=(5,))
    assert story.found("s5-a2") == [(step, 1, Mode.BITS) for step in (6, 7, 8)]


def test_an_import_repeats_nothing_of_a_run_that_did_not_pass_through_it() -> None:
    story = Story().start().run(8).tell(Event.CHECKPOINT_IMPORTED, id="s5-a0", step=5, attempt=0, parent=None)
    assert story.found("s5-a0") == []
    story.start("s5-a0").run(7)
    assert story.found("s5-a0") == [(6, 2, Mode.BITS), (7, 2, Mode.BITS)]


@pytest.mark.parametrize(("now", "mode"), [(ELSEWHERE, Mode.TOLERANCE), (OTHER_CONFIG, Mode.SHOWN)])
def test_what_may_be_asked_depends_on_what_changed(now: dict[str, Any], mode: Mode) -> None:
    story = Story().start().run(12, save_at=(10,))
    assert {found for *_, found in story.found("s10-a1", now=now)} == {mode}


def test_another_layout_on_as_many_ranks_asks_no_bits() -> None:
    story = Story().start().run(12, save_at=(10,))
    assert {mode for *_, mode in story.found("s10-a1", now={**HERE, "topology": {"dp_shard": 2}})} == {Mode.TOLERANCE}


def test_a_detour_over_another_machine_costs_the_bits() -> None:
    """Attempt 2 made s12-a2 elsewhere: its bits are not those that attempt 1 went on from."""
    story = Story().start().run(18, save_at=(10,)).start("s10-a1", facts=ELSEWHERE).run(12, save_at=(12,))
    assert {mode for *_, mode in story.found("s12-a2")} == {Mode.TOLERANCE}
    assert {mode for *_, mode in story.found("s10-a1")} == {Mode.BITS}


def test_rows_under_the_present_config_come_before_older_ones_of_another() -> None:
    story = Story().start().run(14, save_at=(10,)).start("s10-a1", facts=OTHER_CONFIG).run(12)
    assert story.found("s10-a1", now=OTHER_CONFIG) == [(11, 2, Mode.BITS), (12, 2, Mode.BITS)]


def test_an_attempt_whose_replay_differed_does_not_count_unless_it_was_accepted() -> None:
    story = Story().start().run(10, save_at=(10,)).start("s10-a1").run(12)
    story.tell(Event.REPLAY_DIFFERED, reason="why", checkpoint="s10-a1", within=True, relative=0.5, seen="ab")
    assert story.found("s10-a1") == []
    (difference,) = fold_history(story.entries, refs=()).differences
    assert (difference.checkpoint, difference.step, difference.seen) == ("s10-a1", 12, "ab")
    story.tell(Event.REPLAY_VERIFIED, rule="not-reproduced")
    assert story.found("s10-a1") == [(11, 2, Mode.TOLERANCE), (12, 2, Mode.TOLERANCE)]  # and no bits are asked here again
    assert fold_history(story.entries, refs=()).differences == ()


def test_an_outvoted_attempt_does_not_count() -> None:
    story = Story().start().run(13, save_at=(10,)).start("s10-a1").run(13).tell(Event.REPLAY_VERIFIED, rule="outvoted", outvoted=1)
    assert {attempt for _, attempt, _ in story.found("s10-a1")} == {2}


def test_what_lies_behind_a_way_back_on_purpose_does_not_count() -> None:
    story = Story().start().run(18, save_at=(5, 10)).start("s5-a1", asked_by="a person").run(7)
    assert story.found("s5-a1") == [(6, 3 - 1, Mode.BITS), (7, 2, Mode.BITS)]


def test_the_world_size_stands_in_the_surroundings_once() -> None:
    facts = facts_of({"environment": {"world_size": 2}, "topology": {"world_size": 2, "dp_shard": 1}})
    assert facts == Facts({"world_size": 2, **layout_facts({"dp_shard": 1})}, {"data_hash": ""})


def test_a_layout_told_by_its_data_axes_alone_is_the_same_as_with_the_others_at_1() -> None:
    story = Story().start(facts={**HERE, "topology": {"dp_replicate": 2, "dp_shard": 1}}).run(12, save_at=(10,))
    now = {**HERE, "topology": topology(ParallelSection(dp_replicate=2))}
    assert {mode for *_, mode in story.found("s10-a1", now=now)} == {Mode.BITS}
    cut_inside = {**HERE, "topology": topology(ParallelSection(dp_replicate=2, tp=2))}
    assert {mode for *_, mode in story.found("s10-a1", now=cut_inside)} == {Mode.TOLERANCE}


@pytest.mark.parametrize(("deterministic", "mode"), [(True, Mode.BITS), (False, Mode.TOLERANCE)])
def test_an_accelerator_is_asked_for_bits_only_where_it_promises_them(deterministic: bool, mode: Mode) -> None:
    facts = {**HERE, "environment": {"device": "cuda", "deterministic": deterministic}}
    story = Story().start(facts=facts).run(12, save_at=(10,))
    assert {found for *_, found in story.found("s10-a1", now=facts)} == {mode}


def test_many_saves_and_attempts_are_looked_through_in_time_that_grows_with_their_number() -> None:
    story = Story().start().run(6000, save_at=tuple(range(1, 6001)))
    for _ in range(100):
        story.start("s6000-a1")
    refs = fold_lineage(story.entries).refs
    history = fold_history(story.entries, refs=refs)
    started_s = time.process_time()
    assert recorded_after(refs[-2], history=history, rows=story.rows[-1:], now=facts_of(HERE), max_steps=8)
    assert time.process_time() - started_s < 10.0  # 30 s where each look at a line walks along it
