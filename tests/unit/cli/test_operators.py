"""The verbs of operators: what each says of a run that is not there, not live, live, or a copy; and how an order waits for its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.cli.operators import Desk, live_job
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import ManualClock, SystemClock
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.holder import LOCK_NAME
from surefoot.core.strict_json import dumps
from surefoot.observe.control import CONTROL_NAME, ControlTail, Order
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.wishes import Wish, open_wish

VERBS = (["stop"], ["save"], ["pause"], ["rollback", "--to", "4"])


class Book:
    """A run folder with a ledger, as a job leaves it."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder / "run"
        self.dir.mkdir()
        self._ledger = Ledger(self.dir / "ledger.jsonl", clock=ManualClock(), by="rank 0")
        self.tell(Event.RUN_CREATED)
        self.tell(Event.ATTEMPT_STARTED, checkpoint=None)
        for step in (4, 8):
            before = "s4-a1" if step > 4 else None
            self.tell(Event.CHECKPOINT_COMMITTED, step=step, id=f"s{step}-a1", attempt=1, parent=before)

    def tell(self, event: Event, *, step: int = 9, rule: str = "", reason: str = "", **fields: object) -> None:
        self._ledger.append(event, generation=1, attempt=1, step=step, rule=rule, reason=reason, fields={"step": step, **fields})

    def orders(self) -> list[Order]:
        found = ControlTail(self.dir, clock=ManualClock(), look_every_s=0.0).news()
        return [order for order in found if isinstance(order, Order)]


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


@pytest.fixture
def live(book: Book) -> Iterator[Book]:
    with RunLock.acquire(book.dir, job="job", clock=SystemClock(), lease_s=30.0):
        yield book


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_what_is_no_run_is_named(verb: list[str], tmp_path: Path) -> None:
    assert run([verb[0], str(tmp_path / "absent"), *verb[1:]]) == 2
    assert run([verb[0], str(tmp_path), *verb[1:]]) == 2


@pytest.mark.parametrize("verb", ["stop", "save", "pause"])
@pytest.mark.parametrize(
    ("event", "words"), [(None, "no job trains it now"), (Event.RUN_FINISHED, "finished"), (Event.RUN_HALTED, "was halted at step 9")]
)
def test_a_run_that_nobody_trains_takes_no_order(
    verb: str, event: Event | None, words: str, book: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    if event is not None:
        book.tell(event, rule="skips", reason="NaN")
    assert run([verb, str(book.dir), "--json"]) == 2
    assert words in said(capsys)["error"]["what"]
    assert not (book.dir / CONTROL_NAME).exists()


def test_a_copy_of_a_live_run_is_told_apart_from_it(live: Book, capsys: pytest.CaptureFixture[str]) -> None:
    lock = live_job(live.dir)
    assert lock is not None
    write_atomic(live.dir / LOCK_NAME, dumps(replace(lock, renewed_at="2026-01-01T00:00:00.000Z").as_json()))
    for verb in ("stop", "resume"):
        assert run([verb, str(live.dir), "--json"]) == 2
        assert "has not been renewed for" in said(capsys)["error"]["what"]
    assert not live.orders()


def test_an_order_says_who_what_and_to_which_job(live: Book, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pause", str(live.dir), "--for", "5", "--reason", "a look", "--no-wait", "--json"]) == 0
    answer = said(capsys)
    (order,) = live.orders()
    assert (answer["state"], answer["verb"], answer["order"], answer["by"]) == ("given", "pause", order.id, order.by)
    assert (order.verb, order.job, order.reason, dict(order.fields)) == ("pause", "job", "a look", {"limit_s": 5.0})
    assert "@" in order.by


def test_an_order_that_cannot_be_written_is_exit_2(live: Book, capsys: pytest.CaptureFixture[str]) -> None:
    (live.dir / CONTROL_NAME).mkdir()
    assert run(["save", str(live.dir), "--json"]) == 2
    assert "cannot be written" in said(capsys)["error"]["what"]


class Answering(ManualClock):
    """A run that answers while somebody waits."""

    def __init__(self, answer: Callable[[], object]) -> None:
        super().__init__()
        self._answer = answer

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        self._answer()


def desk_of(book: Book, answer: Callable[[], object], *, verb: str = "save") -> Desk:
    job = live_job(book.dir)
    assert job is not None
    return Desk(book.dir, verb, job=job, wait_s=2.0, clock=Answering(answer))


def test_the_answer_is_the_one_with_the_id_of_the_order(live: Book) -> None:
    def answer() -> None:
        live.tell(Event.ORDER_TAKEN, id="another", verb="save")
        live.tell(Event.ORDER_TAKEN, id=live.orders()[0].id, verb="save", step=11)

    desk = desk_of(live, answer)
    told = desk.give(reason="x")
    assert desk.answer().fields["id"] == told.order


def test_a_refusal_is_said_in_the_words_of_the_run(live: Book) -> None:
    desk = desk_of(live, lambda: live.tell(Event.ORDER_REFUSED, id=live.orders()[0].id, verb="resume", reason="it trains"), verb="resume")
    desk.give()
    with pytest.raises(ConfigError, match="the run refused to resume: it trains"):
        desk.answer()


def test_what_was_taken_and_could_not_be_done_is_no_success(live: Book) -> None:
    def answer() -> None:
        order = live.orders()[0].id
        live.tell(Event.ORDER_TAKEN, id=order, verb="rollback")
        live.tell(Event.ORDER_REFUSED, id="another", verb="rollback", reason="another one")
        live.tell(Event.ORDER_REFUSED, id=order, verb="rollback", reason="s4-a1 does not load")

    desk = desk_of(live, answer, verb="rollback")
    desk.give()
    with pytest.raises(ConfigError, match="the run refused to roll back: s4-a1 does not load"):
        desk.until_done(desk.answer(), Event.RUN_ROLLED_BACK)


@pytest.mark.parametrize("length", ["inf", "nan", "2592001"])
def test_a_pause_of_no_length_is_bad_usage(length: str, live: Book, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pause", str(live.dir), "--for", length, "--no-wait", "--json"]) == 2
    assert "--for" in json.dumps(said(capsys)["error"])
    assert not live.orders()


def test_nobody_waits_for_ever(live: Book) -> None:
    desk = desk_of(live, lambda: None)
    desk.give()
    with pytest.raises(SurefootError, match="no answer to the order to save within 2 s"):
        desk.answer()


def test_a_run_that_ends_meanwhile_is_waited_for_no_longer(live: Book) -> None:
    def end() -> None:
        live.tell(Event.RUN_LEFT, reason="received SIGTERM")
        (live.dir / LOCK_NAME).unlink(missing_ok=True)

    desk = desk_of(live, end)
    desk.give()
    with pytest.raises(SurefootError, match=r"ended before it could save; its last word: run\.left: received SIGTERM"):
        desk.answer()


def test_a_run_that_stands_is_told_where_its_next_start_goes_on(book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    (book.dir / "config.toml").write_text("")
    assert run(["rollback", str(book.dir), "--to", "6", "--reason", "odd", "--json", "--yes"]) == 0
    answer = said(capsys)
    assert (answer["state"], answer["checkpoint"]["id"], answer["from_step"]) == ("asked", "s4-a1", 8)
    entries = read_ledger(book.dir / "ledger.jsonl")
    wish = open_wish(entries)
    assert wish == Wish("s4-a1", entries[-1].by)
    assert (entries[-1].event, entries[-1].rule, entries[-1].reason) == ("resume.asked", "rollback", "odd")
    assert not (book.dir / LOCK_NAME).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "3"], "no checkpoint of step 3 or before is left"),
        (["--to", "99999"], "the run has not reached step 99999"),
        (["--to", "4"], "s4-a1 is older than s8-a1, the newest committed one: 4 steps would be given up"),
        (["--to", "8", "--skip", "9"], "'9' is no range of steps"),
        (["--to", "8", "--skip", "8:8"], "'8:8' is no range of steps"),
        (["--to", "4", "--yes", "--skip", "4:6"], "the checkpoint s4-a1 was made after step 4: its samples are in it"),
    ],
)
def test_a_way_back_that_leads_nowhere_changes_nothing(
    arguments: list[str], words: str, book: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    (book.dir / "config.toml").write_text("")
    before = len(read_ledger(book.dir / "ledger.jsonl"))
    assert run(["rollback", str(book.dir), *arguments, "--json"]) == 2
    assert words in said(capsys)["error"]["what"]
    assert len(read_ledger(book.dir / "ledger.jsonl")) == before


def test_what_is_older_than_the_newest_loadable_needs_a_second_word(book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    (book.dir / "config.toml").write_text("")
    book.tell(Event.CHECKPOINT_LOADED, id="s8-a1")
    assert run(["rollback", str(book.dir), "--to", "4", "--json"]) == 2
    assert "s4-a1 is older than s8-a1" in said(capsys)["error"]["what"]
    assert run(["rollback", str(book.dir), "--to", "4", "--yes"]) == 0


def test_an_incident_is_closed_by_name(book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    book.tell(Event.EPISODE_OPENED)
    episode = f"e{len(read_ledger(book.dir / 'ledger.jsonl'))}"
    book.tell(Event.RUN_PAUSED, rule="episode", reason="a person must look")
    assert run(["resume", str(book.dir), "--incident", "e99", "--json"]) == 2
    assert f"no incident e99; the newest are {episode}" in said(capsys)["error"]["what"]
    assert run(["resume", str(book.dir), "--incident", episode, "--cause", "node 7", "--json"]) == 0
    assert said(capsys)["released"]
    closed, released = read_ledger(book.dir / "ledger.jsonl")[-2:]
    assert (closed.event, closed.fields["episode"], closed.reason) == ("episode.closed", episode, "node 7")
    assert (released.event, released.fields["incident"]) == ("run.released", episode)
