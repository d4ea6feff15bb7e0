from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import HealSection
from surefoot.heal.diagnosis import Diagnosis
from surefoot.heal.episodes import Again, Close, Episode, Episodes, GiveUp, Wait, fold_episodes, follow

OPENED = Episode("e5", "grad_level, sustained_loss", "up", 40, 46, (390, 460), "replay")


def entry(seq: int, event: Event, step: int = 46, **fields: Any) -> LedgerEntry:
    return LedgerEntry(seq, "", 1, 1, step, event, "rank 0", "", "", fields, "", "")


def opening(seq: int = 5, step: int = 45, **changed: Any) -> LedgerEntry:
    fields = {name: value for name, value in OPENED.as_json().items() if name != "id"} | changed
    return entry(seq, Event.EPISODE_OPENED, step, **fields)


def test_nothing_is_said_before_the_onset_and_until_a_recurrence_may_be_late() -> None:
    assert follow(OPENED, step=39, recurs=False, can_rotate=True) == Wait()
    assert follow(OPENED, step=OPENED.last_step - 1, recurs=False, can_rotate=True) == Wait()


def test_what_is_gone_in_the_replay_was_the_state() -> None:
    says = follow(OPENED, step=OPENED.last_step, recurs=False, can_rotate=True)
    assert isinstance(says, Close)
    assert says.diagnosis.cause == "state"


def test_what_recurs_is_tried_on_other_ranks_and_then_without_its_samples() -> None:
    says = follow(OPENED, step=46, recurs=True, can_rotate=True)
    assert isinstance(says, Again)
    assert says.phase == "rotated"
    says = follow(replace(OPENED, phase="rotated"), step=46, recurs=True, can_rotate=True)
    assert isinstance(says, Again)
    assert says.phase == "skipped"
    assert isinstance(follow(OPENED, step=46, recurs=True, can_rotate=False), Again)
    says = follow(OPENED, step=46, recurs=True, can_rotate=False, can_skip=False)
    assert isinstance(says, GiveUp)
    assert says.diagnosis.cause == "data"


def test_what_is_gone_without_its_samples_was_the_data() -> None:
    says = follow(replace(OPENED, phase="skipped"), step=OPENED.last_step, recurs=False, can_rotate=True)
    assert isinstance(says, Close)
    assert says.diagnosis.cause == "data"


def test_what_is_gone_on_other_ranks_belongs_to_a_rank_and_a_person() -> None:
    rotated = replace(OPENED, phase="rotated")
    says = follow(rotated, step=OPENED.last_step, recurs=False, can_rotate=True)
    assert isinstance(says, GiveUp)
    assert says.diagnosis.cause == "hardware"
    named = Diagnosis("hardware", "rank 2", (2,))
    assert follow(rotated, step=OPENED.last_step, recurs=False, can_rotate=True, rotated_says=named) == GiveUp(named)


def test_what_recurs_without_its_samples_is_for_a_person() -> None:
    says = follow(replace(OPENED, phase="skipped"), step=46, recurs=True, can_rotate=True)
    assert isinstance(says, GiveUp)
    assert says.diagnosis.cause == "inconclusive"


def test_no_batch_is_blamed_for_what_no_batch_explains() -> None:
    for rule, cause in (("lr_not_applied", "schedule"), ("replica_differs", "hardware"), ("state_is_ill", "state")):
        episode = replace(OPENED, rule=rule, ranks=(1,))
        says = follow(episode, step=46, recurs=True, can_rotate=True)
        assert isinstance(says, GiveUp)
        assert (says.diagnosis.cause, says.diagnosis.ranks) == (cause, (1,))
        over = follow(episode, step=OPENED.last_step, recurs=False, can_rotate=True)
        assert isinstance(over, Close)
        assert (over.diagnosis.cause, over.diagnosis.is_transient) == (cause, True)


def test_the_ledger_says_what_is_open_and_in_which_phase() -> None:
    assert fold_episodes([opening()]).open == OPENED
    moved = fold_episodes([opening(), entry(6, Event.RUN_ROLLED_BACK, 30, episode="e5", phase="rotated")])
    assert moved.open == replace(OPENED, phase="rotated")
    assert Episodes.from_json(moved.as_json()) == moved
    somebody_elses = fold_episodes([opening(), entry(6, Event.RUN_ROLLED_BACK, 30, phase="rotated")])
    assert somebody_elses.open == OPENED


def test_a_closed_episode_still_counts_in_the_budget_and_a_release_gives_it_back() -> None:
    closed = fold_episodes([opening(), entry(6, Event.EPISODE_CLOSED, episode="e5")])
    assert closed.open is None
    assert closed.num_rollbacks(step=60, section=HealSection()) == 1
    assert closed.num_rollbacks(step=45 + 5000, section=HealSection()) == 0
    assert closed.num_rollbacks(step=20, section=HealSection()) == 1  # a step that comes again does not empty it
    assert fold_episodes([opening(), entry(6, Event.RUN_RELEASED)]) == Episodes()


def test_the_second_line_is_folded_too() -> None:
    entries = [opening(), entry(6, Event.RUN_ROLLED_BACK, 30, episode="e5", phase="replay", lr_factor=0.5), entry(7, Event.EPISODE_CLOSED)]
    found = fold_episodes(entries)
    assert (found.lr_factor, found.closed_rules) == (0.5, (OPENED.rule,))
    assert fold_episodes([*entries, entry(8, Event.RUN_RELEASED)]).lr_factor == 0.5
