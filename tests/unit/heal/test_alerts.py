"""Which ledger entries become which alerts, when, and how often."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import AlertsSection
from surefoot.heal.alert_kinds import EVENTS, KIND_OF_RULE, KINDS, SEEN_FROM_OUTSIDE, TEST, WITHHELD, is_answer, kind_of
from surefoot.heal.alerts import AlertState, Sender, alert_of, due, noted, seconds_of, told
from tests.unit.heal.ledgers import Story

SENDER = Sender("mine", "runs/mine", "node7")
LIMITS = AlertsSection(group_s=10.0, repeat_s=900.0, max_per_hour=3)


def folded(entries: list[LedgerEntry], *, since_s: float = 0.0) -> AlertState:
    state = AlertState()
    for entry in entries:
        state = noted(state, entry, since_s=since_s)
    return state


def lose_a_rank(story: Story, rank: int, *, after_s: float = 0.0) -> None:
    story.tell(Event.RANK_LOST, step=40, rule="rank", reason=f"rank {rank} was killed by SIGKILL", after_s=after_s, fields={"rank": rank})
    story.tell(Event.RESTART_DECIDED, step=40, reason="restart 1 of 20", fields={"kind": "restart", "exit_code": None})


def send(story: Story, state: AlertState, names: tuple[str, ...]) -> AlertState:
    """As the alerter does: the line that says so, folded like any other."""
    alert = alert_of(state, names, sender=SENDER)
    fields = {"kind": alert.kind, "count": alert.count, "to": ["webhook"], "covers": dict(alert.covers)}
    return noted(state, story.tell(Event.ALERT_SENT, fields=fields))


def test_a_lost_rank_is_one_alert_with_what_was_done_about_it() -> None:
    story = Story()
    lose_a_rank(story, 3)
    state = folded(story.entries)
    assert due(state, now_s=story.now_s, limits=LIMITS) == ()  # more of the kind may come
    assert due(state, now_s=story.now_s + 10, limits=LIMITS) == (("rank-lost",),)
    alert = alert_of(state, ("rank-lost",), sender=SENDER)
    assert (alert.kind, alert.severity, alert.ranks, alert.count, alert.step) == ("rank-lost", "warn", (3,), 1, 40)
    assert alert.what == "rank 3 was killed by SIGKILL"
    assert alert.where == "rank 3, step 40, attempt 1, generation 1, ledger entry 1, host node7"
    assert alert.action == "restart: restart 1 of 20"
    assert alert.command == "surefoot status runs/mine"
    assert alert.runbook == "runbook entry: rank-lost"
    assert alert_of(state, ("rank-lost",), sender=replace(SENDER, runbook="https://wiki/run")).runbook == "https://wiki/run#rank-lost"


def test_what_comes_within_the_group_is_one_and_what_comes_again_waits() -> None:
    story = Story()
    lose_a_rank(story, 0)
    lose_a_rank(story, 1, after_s=5)
    state = folded(story.entries)
    alert = alert_of(state, ("rank-lost",), sender=SENDER)
    assert (alert.count, alert.ranks, alert.title) == (2, (0, 1), "mine: ranks were lost (2 times)")
    state = send(story, state, ("rank-lost",))
    assert not state.pending
    sent_s = story.now_s
    lose_a_rank(story, 2, after_s=60)
    state = folded(story.entries)
    assert due(state, now_s=sent_s + 899, limits=LIMITS) == ()
    assert due(state, now_s=sent_s + 900, limits=LIMITS) == (("rank-lost",),)
    assert alert_of(state, ("rank-lost",), sender=SENDER).ranks == (2,)


def test_the_answer_to_what_was_told_already_is_no_news() -> None:
    story = Story()
    story.tell(Event.RANK_LOST, fields={"rank": 1})
    send(story, folded(story.entries), ("rank-lost",))
    story.tell(Event.RESTART_DECIDED, fields={"kind": "restart"})
    assert not folded(story.entries).pending
    story.tell(Event.RESTART_DECIDED, fields={"kind": "stop", "exit_code": 93})  # control: a stop is
    assert list(folded(story.entries).pending) == ["restarts-stopped"]


def test_a_skip_that_nobody_found_ill_is_no_news() -> None:
    """A back-off of the fp16 scale skips too."""
    story = Story()
    story.tell(Event.UPDATE_SKIPPED, step=7, rule="loss_scale")
    assert not folded(story.entries).pending
    story.found("nonfinite", step=8)
    story.tell(Event.UPDATE_SKIPPED, step=8, rule="nonfinite")
    alert = alert_of(folded(story.entries), ("anomaly",), sender=SENDER)
    assert (alert.count, alert.step, alert.action) == (1, 8, "the update was skipped")
    assert alert.what == "nonfinite: nonfinite fired"


@pytest.mark.parametrize(
    ("event", "rule", "fields", "kind"),
    [
        (Event.RUN_HALTED, "replay", {}, "run-halted"),
        (Event.RUN_HALTED, "skips_in_a_row", {}, "circuit-breaker"),
        (Event.RUN_PAUSED, "breaker", {}, "circuit-breaker"),
        (Event.RUN_PAUSED, "pause", {}, "run-paused"),
        (Event.RESTART_DECIDED, "large-scale", {"kind": "stop", "exit_code": 7}, "run-held"),
        (Event.RESTART_DECIDED, "deterministic", {"kind": "stop", "exit_code": 93}, "restarts-stopped"),
        (Event.ANOMALY_FOUND, "", {"rule": "outlier_loss", "asks": "skip"}, "anomaly"),
        (Event.ANOMALY_FOUND, "", {"rule": "outlier_loss_mild", "asks": "record"}, None),
        (Event.ANOMALY_FOUND, "", {"rule": "canary_rise", "asks": "rollback"}, "canary"),
        (Event.ANOMALY_FOUND, "", {"rule": "replica_differs", "asks": "record"}, "silent-corruption"),
        (Event.ANOMALY_FOUND, "", {"rule": "diverged", "asks": "rollback"}, "diverged"),
        (Event.ANOMALY_FOUND, "", {"rule": "rank_is_wrong", "asks": "pause"}, "rank-wrong"),
        (Event.ANOMALY_FOUND, "", {"rule": "state_is_ill", "asks": "rollback"}, "weights-ill"),
        (Event.ANOMALY_FOUND, "", {"rule": "rebound", "asks": "alert"}, "rebound"),
        (Event.ANOMALY_FOUND, "", {"rule": "rebound", "asks": "record"}, None),
        (Event.ANOMALY_FOUND, "", {"rule": "bits_do_not_repeat", "asks": "alert"}, "bits-not-repeated"),
        (Event.EPISODE_DIAGNOSED, "", {"cause": "data"}, "episode-diagnosed"),
        (Event.RUN_ROLLED_BACK, "", {}, "rolled-back"),
        (Event.AIDE_LOST, "", {"wait_s": 1.0}, None),
        (Event.AIDE_LOST, "", {"wait_s": None}, "aide-lost"),
        (Event.CHECKPOINT_COMMITTED, "", {}, None),
    ],
)
def test_kinds(event: Event, rule: str, fields: dict[str, object], kind: str | None) -> None:
    assert kind_of(Story().tell(event, rule=rule, fields=fields)) == kind


def test_every_event_that_is_told_exists_and_every_kind_is_reached() -> None:
    assert {event.value for event in Event} >= EVENTS
    story = Story()
    stops: list[dict[str, object]] = [{"kind": "stop", "exit_code": code} for code in (7, 93)]
    rules: list[dict[str, object]] = [
        {"rule": rule, "asks": "skip"} for rule in ("outlier_loss", "canary_rise", "replica_differs", *KIND_OF_RULE)
    ]
    reached = {
        kind_of(story.tell(Event(event), rule=rule, fields=fields))
        for event in EVENTS
        for rule in ("", "breaker")
        for fields in (*stops, *rules)
    }
    assert reached - {None} == set(KINDS) - {WITHHELD, TEST} - SEEN_FROM_OUTSIDE


def test_the_end_of_a_run_waits_for_nothing() -> None:
    story = Story()
    for _ in range(2):
        story.tell(Event.RUN_HALTED, rule="replay", reason="it differs", after_s=1)
        state = folded(story.entries)
        assert due(state, now_s=story.now_s, limits=replace(LIMITS, max_per_hour=1)) == (("run-halted",),)
        state = send(story, state, ("run-halted",))
    assert state.sent == ()  # and takes nobody's place in the hour


def test_a_pause_that_ends_at_once_is_told_as_the_halt_alone() -> None:
    story = Story()
    for limit_s, told_of in ((0.0, ["run-halted"]), (60.0, ["run-halted", "run-paused"])):
        story.tell(Event.RUN_PAUSED, rule="no_way_back", fields={"limit_s": limit_s})
        story.tell(Event.RUN_HALTED, rule="no_way_back")
        assert sorted(folded(story.entries[-2:]).pending) == told_of


@pytest.mark.parametrize(("cause", "action"), [("data", "its samples are left out"), ("inconclusive", "recorded")])
def test_a_diagnosis_says_what_was_done_about_it(cause: str, action: str) -> None:
    story = Story()
    story.tell(Event.EPISODE_DIAGNOSED, fields={"cause": cause, "phase": "skipped"})
    assert alert_of(folded(story.entries), ("episode-diagnosed",), sender=SENDER).action == action


def test_more_than_the_hour_allows_is_told_together() -> None:
    story = Story()
    for event in (Event.COPY_FAILED, Event.SAVE_FAILED, Event.RANK_LOST, Event.RUN_ROLLED_BACK, Event.CHECKPOINT_DAMAGED):
        story.tell(event)
    story.tell(Event.SAVE_FAILED)
    state = folded(story.entries)
    now_s = story.now_s + 20
    groups = due(state, now_s=now_s, limits=LIMITS)
    assert groups == (("checkpoint-damaged",), ("copy-failed",), ("save-failed", "rank-lost", "rolled-back"))  # the gravest first
    alert = alert_of(state, groups[-1], sender=SENDER)
    assert (alert.kind, alert.count) == (WITHHELD, 4)
    assert alert.counts == {"save-failed": 2, "rank-lost": 1, "rolled-back": 1}
    assert alert.covers == {"save-failed": 6, "rank-lost": 3, "rolled-back": 4}
    for names in groups:
        state = send(story, state, names)
    assert not state.pending
    story.tell(Event.SHARD_QUARANTINED, after_s=60)
    state = noted(state, story.entries[-1])
    assert due(state, now_s=story.now_s + 3000, limits=LIMITS) == ()  # three in this hour
    assert due(state, now_s=story.now_s + 3600, limits=LIMITS) == (("shard-quarantined",),)


def test_at_the_end_nothing_is_waited_for() -> None:
    story = Story()
    lose_a_rank(story, 0)
    state = send(story, folded(story.entries), ("rank-lost",))
    story.tell(Event.RANK_LOST, fields={"rank": 1})
    story.tell(Event.RUN_FINISHED)
    for entry in story.entries[-2:]:
        state = noted(state, entry)
    assert due(state, now_s=story.now_s, limits=LIMITS) == ()
    assert due(state, now_s=story.now_s, limits=LIMITS, is_over=True) == (("rank-lost",), ("run-finished",))


def test_what_was_old_before_anybody_was_told_anything_is_no_news() -> None:
    story = Story()
    story.tell(Event.RANK_LOST, fields={"rank": 0})
    story.tell(Event.SAVE_FAILED, after_s=7200)
    started_s = story.now_s
    state = folded(story.entries, since_s=started_s - 3600)
    assert list(state.pending) == ["save-failed"]
    send(story, state, ("save-failed",))
    story.tell(Event.COPY_FAILED, after_s=60)
    # Control: whoever starts hours later tells what was missed meanwhile.
    assert list(folded(story.entries, since_s=started_s + 9000).pending) == ["copy-failed"]


def test_saying_twice_that_something_was_told_changes_nothing() -> None:
    story = Story()
    lose_a_rank(story, 0)
    state = send(story, folded(story.entries), ("rank-lost",))
    assert noted(state, story.entries[-1]) == state


def test_what_was_given_up_is_not_told_later() -> None:
    story = Story()
    lose_a_rank(story, 0)
    alert = alert_of(folded(story.entries), ("rank-lost",), sender=SENDER)
    story.tell(Event.ALERT_FAILED, fields={"kind": alert.kind, "to": ["webhook"], "covers": dict(alert.covers)})
    state = folded(story.entries)
    assert (state.pending, state.sent) == ({}, ())
    story.tell(Event.ALERT_FAILED, fields={"kind": "rank-lost", "to": ["webhook"]})  # a failure that is tried again covers nothing
    lose_a_rank(story, 1)
    assert list(folded(story.entries).pending) == ["rank-lost"]


_NEWS = st.sampled_from(
    [Event.RANK_LOST, Event.SAVE_FAILED, Event.COPY_FAILED, Event.RUN_LEFT, Event.CHECKPOINT_DAMAGED, Event.RUN_ROLLED_BACK]
)


@given(st.lists(st.tuples(_NEWS, st.floats(0.0, 2000.0)), max_size=60), st.integers(1, 4), st.integers(0, 59))
def test_nothing_is_lost_and_no_hour_has_more_than_it_may(news: list[tuple[Event, float]], most: int, killed_at: int) -> None:
    """Whatever comes when, and with a sender that is killed in between and folds the ledger anew."""
    story, limits, state = Story(), replace(LIMITS, max_per_hour=most), AlertState()
    covered = 0
    for number, (event, wait_s) in enumerate(news):
        state = noted(state, story.tell(event, after_s=wait_s))
        if number == killed_at:
            state = folded(story.entries)
        for names in due(state, now_s=story.now_s, limits=limits):
            covered += sum(state.pending[name].count for name in names)
            state = send(story, state, names)
    assert covered + sum(group.count for group in state.pending.values()) == len(news)
    sent_s = [seconds_of(entry.time_utc) for entry in story.entries if entry.event == Event.ALERT_SENT]
    assert all(sum(first <= when < first + 3600 for when in sent_s) <= most for first in sent_s)
    assert folded(story.entries) == state


def test_told_keeps_what_came_meanwhile() -> None:
    story = Story()
    lose_a_rank(story, 0)
    state = folded(story.entries)
    alert = alert_of(state, ("rank-lost",), sender=SENDER)
    late = story.tell(Event.RANK_LOST, fields={"rank": 2})
    state = told(noted(state, late), alert.kind, covers=alert.covers, seq=-1, when_s=story.now_s)
    assert state.pending["rank-lost"].entries == (late,)
    assert not is_answer(late)


def test_the_runbook_has_an_entry_for_each_kind_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "runbook.md").read_text()
    entries = dict(re.findall(r"^## ([a-z-]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert set(entries) == set(KINDS)
    for name, text in entries.items():
        assert {"**Means.**", "**Check.**", "**Do.**"} <= set(re.findall(r"\*\*\w+\.\*\*", text)), name
