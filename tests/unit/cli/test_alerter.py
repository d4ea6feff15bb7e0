"""The alerter on a real ledger and a real receiver, under a clock that the test owns."""

from __future__ import annotations

import json
import resource
from datetime import timedelta
from pathlib import Path

import pytest

from surefoot.cli.alerter import MAX_TRIES, Alerter, alert_aides, trial_deliveries, wait_after_s
from surefoot.cli.train_lines import no_alerts
from surefoot.core.clock import ManualClock
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import AlertsSection
from surefoot.heal.alert_senders import Destination
from surefoot.heal.alerts import Sender
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from tests.receivers import HttpReceiver, http_receiver

SECTION = AlertsSection(group_s=0.0, repeat_s=0.0, max_per_hour=1000, timeout_s=1.0)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Run:
    """A run folder whose ledger is written under a test's clock. What the alerter itself writes has the time of the machine."""

    def __init__(self, folder: Path) -> None:
        self.dir, self.clock = folder, ManualClock()
        self.ledger = Ledger(folder / LEDGER_NAME, clock=self.clock, by="agent")

    def tell(self, event: Event, *, reason: str = "", fields: dict[str, object] | None = None) -> None:
        self.ledger.append(event, generation=1, attempt=1, step=5, reason=reason, fields=fields or {})

    def lose(self, rank: int) -> None:
        self.tell(Event.RANK_LOST, reason=f"rank {rank} was killed", fields={"rank": rank})

    def alerter(self, *places: Destination) -> Alerter:
        return Alerter(self.dir, section=SECTION, places=places, sender=Sender("mine", str(self.dir), "here"), clock=self.clock)

    def entries(self, event: Event) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.ledger.path) if entry.event == event]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def webhook(receiver: HttpReceiver) -> Destination:
    return Destination("webhook", receiver.address)


def test_each_entry_is_told_once_over_restarts_of_the_alerter(run: Run) -> None:
    with http_receiver() as receiver:
        first = run.alerter(webhook(receiver))
        run.lose(1)
        first.look()
        first.look()
        assert [message["ranks"] for message in receiver.messages] == [[1]]
        run.tell(Event.SAVE_FAILED, reason="disk full")
        run.alerter(webhook(receiver)).look()
        run.alerter(webhook(receiver)).look()
        assert [message["kind"] for message in receiver.messages] == ["rank-lost", "save-failed"]
    assert [entry.fields["covers"] for entry in run.entries(Event.ALERT_SENT)] == [{"rank-lost": 1}, {"save-failed": 3}]


def test_a_receiver_that_is_down_is_ledgered_once_and_gets_all_of_it_later(run: Run) -> None:
    with http_receiver() as receiver:
        port = receiver.port
    alerter = run.alerter(Destination("webhook", receiver.address))
    run.lose(0)
    alerter.look()
    for _ in range(3):
        run.clock.sleep(300)
        alerter.look()
    run.lose(1)
    assert len(run.entries(Event.ALERT_FAILED)) == 1
    assert run.entries(Event.ALERT_FAILED)[0].reason == "Connection refused"
    with http_receiver(port) as receiver:
        run.clock.sleep(300)
        alerter.look()
    (message,) = receiver.messages
    assert (message["ranks"], message["count"]) == ([0, 1], 2)
    assert "secret" not in run.ledger.path.read_text()


def test_tries_are_spaced_and_bounded(run: Run) -> None:
    with http_receiver() as receiver:
        receiver.status = 503
        alerter = run.alerter(webhook(receiver))
        run.lose(0)
        alerter.look()
        alerter.look()  # too soon: nothing is tried
        for number in range(1, MAX_TRIES):
            assert alerter.has_news
            run.clock.sleep(wait_after_s(number))
            alerter.look()
        assert not alerter.has_news
        given_up = run.entries(Event.ALERT_FAILED)[-1]
        assert (given_up.reason, given_up.fields["covers"]) == (f"given up after {MAX_TRIES} tries", {"rank-lost": 1})
        receiver.status = 200
        run.tell(Event.RUN_FINISHED)
        run.clock.sleep(300)
        alerter.look(is_over=True)
    assert [message["kind"] for message in receiver.messages] == ["run-finished"]
    assert sum(wait_after_s(number) for number in range(1, MAX_TRIES)) < 3600


def test_a_kind_that_joins_others_under_way_is_given_up_too(run: Run) -> None:
    """By place and kind: what an alert covers may change from try to try."""
    with http_receiver() as receiver:
        receiver.status = 503
        alerter = run.alerter(webhook(receiver))
        for event in (Event.RANK_LOST, Event.SAVE_FAILED, Event.COPY_FAILED, Event.AIDE_LOST, *[Event.RUN_LEFT] * (MAX_TRIES - 4)):
            run.tell(event, fields={"rank": 0, "wait_s": None})
            alerter.look()
            run.clock.sleep(300)
        (given_up,) = [entry for entry in run.entries(Event.ALERT_FAILED) if entry.reason.startswith("given up")]
        assert (given_up.fields["covers"], given_up.fields["to"]) == ({"rank-lost": 1}, ["webhook"])
        receiver.status = 200
        alerter.look()
    assert {message["kind"] for message in receiver.messages} == {"save-failed", "copy-failed", "aide-lost", "run-left"}


def test_a_clock_that_is_set_neither_hurries_nor_delays_a_try(run: Run) -> None:
    with http_receiver() as receiver:
        receiver.status = 503
        alerter = run.alerter(webhook(receiver))
        run.lose(0)
        alerter.look()
        receiver.status = 200
        run.clock.epoch += timedelta(hours=1)
        alerter.look()
        assert not receiver.messages
        run.clock.epoch -= timedelta(hours=1)
        run.clock.sleep(wait_after_s(1))
        alerter.look()
    assert len(receiver.messages) == 1


def test_one_place_that_fails_is_told_later_and_silences_no_other(run: Run, tmp_path: Path) -> None:
    up, got = tmp_path / "up", tmp_path / "got"
    command = Destination("command", f"test -e {up} || exit 9; cat >> {got}; echo >> {got}")
    with http_receiver() as receiver:
        alerter = run.alerter(command, webhook(receiver))
        run.lose(0)
        run.tell(Event.SAVE_FAILED)
        alerter.look()
        assert not got.exists()
        up.touch()
        alerter = run.alerter(command, webhook(receiver))  # another one, which reads who was told what
        alerter.look()
        assert not alerter.has_news
        assert len(receiver.messages) == 2
    assert {json.loads(line)["kind"] for line in got.read_text().splitlines() if line} == {"rank-lost", "save-failed"}
    assert [entry.fields["to"] for entry in run.entries(Event.ALERT_SENT)] == [["webhook"]] * 2 + [["command"]] * 2


def test_one_place_that_fails_does_not_silence_the_others(run: Run, tmp_path: Path) -> None:
    with http_receiver() as receiver:
        alerter = run.alerter(Destination("command", "exit 9"), webhook(receiver))
        run.lose(0)
        run.tell(Event.SAVE_FAILED)
        alerter.look()
        assert {message["kind"] for message in receiver.messages} == {"rank-lost", "save-failed"}
    (failed,) = run.entries(Event.ALERT_FAILED)
    assert (failed.reason, failed.fields["to"]) == ("the command ended with 9", ["command"])
    assert [entry.fields["to"] for entry in run.entries(Event.ALERT_SENT)] == [["webhook"], ["webhook"]]


def test_a_ledger_that_cannot_be_written_sends_nothing_twice(run: Run) -> None:
    with http_receiver() as receiver:
        alerter = run.alerter(webhook(receiver))
        run.lose(0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.ledger.path.stat().st_size, hard))  # as a full disk: no file grows beyond this
        try:
            alerter.look()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert run.entries(Event.ALERT_SENT) == []
        run.lose(1)
        alerter.look()
    assert [message["ranks"] for message in receiver.messages] == [[0], [1]]


def test_it_is_there_only_where_alerts_go_somewhere(tmp_path: Path) -> None:
    assert alert_aides(AlertsSection(), run_dir=tmp_path) == []
    (aide,) = alert_aides(AlertsSection(command="true", timeout_s=2.0), run_dir=tmp_path)
    assert (aide.name, aide.end_limit_s, aide.only_when_finished) == ("alerter", 6.0, False)
    with pytest.raises(ConfigError, match="NOT_THERE"):
        alert_aides(AlertsSection(webhook="env:NOT_THERE"), run_dir=tmp_path)
    assert no_alerts(AlertsSection()) == []
    assert "no alerts" in no_alerts(AlertsSection(command="true"))[0]


def test_a_trial_tells_which_place_took_it(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nname = "mine"\n[alerts]\n')
    with pytest.raises(ConfigError, match="names no place"):
        list(trial_deliveries(config))
    with http_receiver() as receiver:
        config.write_text(f'[run]\nname = "mine"\n[alerts]\nwebhook = "{receiver.address}"\ncommand = "exit 4"\n')
        assert list(trial_deliveries(config)) == [("webhook", ""), ("command", "the command ended with 4")]
    assert [message["kind"] for message in receiver.messages] == ["test"]
