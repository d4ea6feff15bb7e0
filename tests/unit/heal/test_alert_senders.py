"""Deliveries over real sockets and processes: what arrives, in which form, and what a failure says, which is never an address."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from surefoot.core.clock import ManualClock
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.sections import AlertsSection
from surefoot.heal.alert_senders import Destination, Undelivered, as_slack, deliver, destinations
from surefoot.heal.alerts import Alert, AlertState, Sender, alert_of, noted, trial_alert
from tests.receivers import http_receiver, smtp_receiver
from tests.unit.heal.ledgers import Story

SENDER = Sender("mine", "runs/mine", "node7")
_SECRET = "hook-with-a-secret"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def alert() -> Alert:
    story = Story()
    story.tell(Event.RANK_LOST, step=40, reason="rank 1 was killed by SIGKILL <&>", fields={"rank": 1})
    return alert_of(noted(AlertState(), story.entries[0]), ("rank-lost",), sender=SENDER)


def sent(section: AlertsSection, alert: Alert, *, environ: dict[str, str] | None = None) -> None:
    (place,) = destinations(section, environ=environ or {}, host="node7")
    deliver(place, alert, timeout_s=2.0)


def test_a_webhook_gets_the_generic_form(alert: Alert) -> None:
    with http_receiver() as receiver:
        sent(AlertsSection(webhook="env:HOOK"), alert, environ={"HOOK": receiver.address})
    (message,) = receiver.messages
    assert message["schema_version"] == 1
    assert (message["kind"], message["run"], message["step"], message["ranks"]) == ("rank-lost", "mine", 40, [1])
    assert {"what", "where", "action", "runbook", "command", "time_utc", "severity", "count"} <= set(message)


def test_slack_gets_its_own_form(alert: Alert) -> None:
    with http_receiver() as receiver:
        sent(AlertsSection(slack=receiver.address), alert)
    (message,) = receiver.messages
    assert set(message) == {"text", "blocks"}
    assert [block["type"] for block in message["blocks"]] == ["header", "section", "context"]
    assert "SIGKILL &lt;&amp;&gt;" in message["blocks"][1]["text"]["text"]
    assert message["text"].startswith("[warn] mine: ranks were lost")


def test_slack_is_sent_no_more_than_it_takes(alert: Alert) -> None:
    story = Story()
    story.tell(Event.RANK_LOST, reason="x" * 10_000)
    long = as_slack(alert_of(noted(AlertState(), story.entries[0]), ("rank-lost",), sender=SENDER))
    assert len(long["blocks"][1]["text"]["text"]) < 3000
    assert len(long["text"]) < 3000


@pytest.mark.parametrize("status", [500, 404, 302])
def test_what_is_not_taken_is_no_delivery(alert: Alert, status: int) -> None:
    """A redirected POST would arrive as a GET without its body."""
    with http_receiver() as receiver:
        receiver.status = status
        with pytest.raises(Undelivered) as caught:
            sent(AlertsSection(webhook=receiver.address), alert)
    assert caught.value.what == f"the receiver answered {status}"
    assert _SECRET not in str(caught.value)
    assert receiver.messages == []


def test_nobody_there_is_said_without_the_address(alert: Alert) -> None:
    with http_receiver() as receiver:
        address = receiver.address
    with pytest.raises(Undelivered) as caught:
        sent(AlertsSection(webhook=address), alert)
    assert caught.value.what == "Connection refused"
    (place,) = destinations(AlertsSection(webhook=address), environ={}, host="")
    assert _SECRET not in repr(place)


def test_mail_arrives_with_what_a_person_needs(alert: Alert) -> None:
    section = AlertsSection(email=("a@b.example", "c@d.example"), email_from="surefoot@b.example")
    with smtp_receiver(refused=frozenset({"nobody@b.example"})) as server:
        deliver(Destination("email", server.address, section.email, section.email_from), alert, timeout_s=2.0)
        with pytest.raises(Undelivered, match="refused 1 of 2 recipients"):
            deliver(Destination("email", server.address, ("nobody@b.example", "a@b.example"), "x@b.example"), alert, timeout_s=2.0)
    mail = server.mails[0]
    assert (mail["from"], mail["to"]) == ("surefoot@b.example", ["a@b.example", "c@d.example"])
    assert "Subject: [surefoot warn] mine: ranks were lost" in mail["text"]
    assert "surefoot status runs/mine" in mail["text"]
    assert "runbook entry: rank-lost" in mail["text"]


def test_a_password_goes_to_this_machine_only_when_there_is_no_tls(alert: Alert) -> None:
    with smtp_receiver(asks_password=True) as server:
        address = f"smtp://me:se%40cret@{server.address}"
        sent(AlertsSection(email=("a@b.example",), smtp="env:MAIL"), alert, environ={"MAIL": address})
        assert base64.b64decode(server.passwords[0]) == b"\0me\0se@cret"
        elsewhere = address.replace("127.0.0.1", "0x7f000001")  # the same server, by a name that does not say so
        with pytest.raises(Undelivered, match="not sent in the clear"):
            sent(AlertsSection(email=("a@b.example",), smtp=elsewhere), alert)
    assert len(server.passwords) == len(server.mails) == 1


def test_a_command_gets_the_generic_form_on_its_standard_input(alert: Alert, tmp_path: Path) -> None:
    path = tmp_path / "got"
    sent(AlertsSection(command=f"cat > {path}"), alert)
    assert json.loads(path.read_text())["kind"] == "rank-lost"
    with pytest.raises(Undelivered, match="ended with 3"):
        sent(AlertsSection(command="exit 3"), alert)
    sent(AlertsSection(command="exec <&-; exit 0"), alert)  # one that does not want to know is no failure


def test_a_command_that_hangs_is_ended_with_all_that_it_started(alert: Alert, tmp_path: Path) -> None:
    place = Destination("command", f"(sleep 60; touch {tmp_path}/late) & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(Undelivered, match=r"did not end within 0\.2 s"):
        deliver(place, alert, timeout_s=0.2)
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (AlertsSection(webhook="env:NOT_THERE"), "the environment has no NOT_THERE"),
        (AlertsSection(webhook="ftp://x"), "no http or https address"),
        (AlertsSection(email=("a@b",)), "needs a mail server"),
        (AlertsSection(email=("a@b",), smtp="host:port:more"), "it is no mail server"),
    ],
)
def test_what_cannot_work_is_refused(section: AlertsSection, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        destinations(section, environ={}, host="h")


def test_a_test_says_that_it_is_one() -> None:
    alert = trial_alert(SENDER, time_utc=ManualClock().utc())
    assert (alert.kind, alert.covers, alert.title) == ("test", {}, "mine: this is a test: nothing happened")
