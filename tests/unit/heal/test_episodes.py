from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import HealSection
from surefoot.heal.diagnosis import Diagnosis
from surefoot.heal.episodes import Again, Close, Episode, Episodes, GiveUp, Means, Wait, fold_episodes, follow

OPENED = Episode("e5", "grad_level, sustained_loss", "up", 40, 46, (390, 460), "replay")
MEANS = Means(can_rotate=True, can_skip=True, num_steps=1000)


def entry(seq: int, event: Event, step: int = 46, **fields: Any) -> LedgerEntry:
    return LedgerEntry(seq, "", 1, 1, step, event, "rank 0", "", "", fields, "", "")


def opening(seq: int = 5, step: int = 45, **changed: Any) -> LedgerEntry:
    fields = {name: value for name, value in OPENED.as_json().items() if name != "id"} | changed
    return entry(seq, Event.EPISODE_OPENED, step, **fields)


def test_nothing_is_said_before_the_onset_and_until_a_recurrence_may_be_late() -> None:
    assert follow(OPENED, step=39, again="", means=MEANS) == Wait()
    assert follow(OPENED, step=OPENED.last_step - 1, again="", means=MEANS) == Wait()


def test_what_is_gone_in_the_replay_was_the_state() -> None:
    says = follow(OPENED, step=OPENED.last_step, again="", means=MEANS)
    assert isinstance(says, Close)
    assert says.diagnosis.cause == "state"


def test_what_recurs_is_tried_on_other_ranks_and_then_without_its_samples() -> None:
    says = follow(OPENED, step=46, again="grad_level", means=MEANS)
    assert isinstance(says, Again)
    assert says.phase == "rotated"
    says = follow(replace(OPENED, phase="rotated"), step=46, again="grad_level", means=MEANS)
    assert isinstance(says, Again)
    assert says.phase == "skipped"
    assert isinstance(follow(OPENED, step=46, again="grad_level", means=replace(MEANS, can_rotate=False)), Again)
    says = follow(OPENED, step=46, again="grad_level", means=replace(MEANS, can_rotate=False, can_skip=False))
    assert isinstance(says, GiveUp)
    assert says.diagnosis.cause == "data"


def test_what_is_gone_without_its_samples_was_the_data() -> None:
    says = follow(replace(OPENED, phase="skipped"), step=OPENED.last_step, again="", means=MEANS)
    assert isinstance(says, Close)
    assert says.diagnosis.cause == "data"


def test_what_is_gone_on_other_ranks_belongs_to_a_rank_and_a_person() -> None:
    rotated = replace(OPENED, phase="rotated")
    says = follow(rotated, step=OPENED.last_step, again="", means=MEANS)
    assert isinstance(says, GiveUp)
    assert says.diagnosis.cause == "inconclusive"
    named = Diagnosis("hardware", "rank 2", (2,))
    assert follow(rotated, step=OPENED.last_step, again="", means=MEANS, rotated_says=named) == GiveUp(named)


def test_what_recurs_without_its_samples_is_for_a_person() -> None:
    says = follow(replace(OPENED, phase="skipped"), step=46, again="grad_level", means=MEANS)
    assert isinstance(says, GiveUp)
    assert says.diagnosis.cause == "inconclusive"


def test_no_batch_is_blamed_for_what_no_batch_explains() -> None:
    for rule, cause in (("lr_not_applied", "schedule"), ("replica_differs", "hardware"), ("state_is_ill", "state")):
        episode = replace(OPENED, rule=rule, ranks=(1,))
        says = follow(episode, step=46, again="grad_level", means=MEANS)
        assert isinstance(says, GiveUp)
        assert (says.diagnosis.cause, says.diagnosis.ranks) == (cause, (1,))
        over = follow(episode, step=OPENED.last_step, again="", means=MEANS)
        assert isinstance(over, Close)
        assert (over.diagnosis.cause, over.diagnosis.is_transient) == (cause, True)


def test_the_ledger_says_what_is_open_and_in_which_phase() -> None:
    assert fold_episodes([opening()]).open == OPENED
    assert not fold_episodes([opening()]).is_back
    moved = fold_episodes([opening(), entry(6, Event.RUN_ROLLED_BACK, 30, episode="e5", phase="rotated")])
    assert (moved.open, moved.is_back) == (replace(OPENED, phase="rotated"), True)
    asked = fold_episodes([opening(), entry(6, Event.RUN_ROLLED_BACK, 30, episode="e5"), entry(7, Event.BLOCK_ASKED, 30, episode="e5")])
    assert (asked.open, asked.is_back) == (replace(OPENED, phase="skipped"), False)  # killed before it went back without it
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


def test_the_end_of_the_run_ends_an_episode() -> None:
    short = replace(MEANS, num_steps=OPENED.detected_step + 2)
    assert follow(OPENED, step=short.num_steps - 1, again="", means=short) == Wait()
    assert isinstance(follow(OPENED, step=short.num_steps, again="", means=short), Close)


def test_a_known_cause_counts_wherever_it_stands_among_the_rules() -> None:
    assert replace(OPENED, rule="diverged, replica_differs").known_cause == "hardware"
