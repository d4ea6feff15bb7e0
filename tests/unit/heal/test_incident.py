"""An incident as the ledger tells it, and its file."""

from __future__ import annotations

import json
from pathlib import Path

from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.guard.incident import write_incident
from surefoot.heal.incident import episode_ids, incident_of
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from tests.unit.heal.ledgers import Story


def story_of_an_episode() -> Story:
    story = Story()
    story.found("outlier_loss", step=5)  # long before: another matter
    story.found("sustained_loss", step=42, asks="rollback", onset=40)
    opened = {"rule": "sustained_loss", "onset_step": 40, "detected_step": 42, "samples": [156, 168], "phase": "replay", "ranks": []}
    story.tell(Event.EPISODE_OPENED, step=41, rule="sustained_loss", reason="the loss stays high", fields=opened)
    story.tell(Event.RUN_ROLLED_BACK, step=20, reason="the loss stays high", fields={"checkpoint": "s20-a1", "episode": "e3"})
    story.attempt = 2
    story.found("sustained_loss", step=42, asks="rollback", onset=40)
    return story


def test_an_open_episode_and_a_closed_one() -> None:
    story = story_of_an_episode()
    assert episode_ids(story.entries) == ["e3"]
    told = incident_of(story.entries, "e3")
    assert told is not None
    assert (told["state"], told["cause"], told["steps"], told["samples"]) == ("open", None, [40, 42], [156, 168])
    assert [one["seq"] for one in told["findings"]] == [2, 5]
    assert [one["event"] for one in told["actions"]] == ["run.rolled_back"]
    fields = {"episode": "e3", "cause": "data", "ranks": [1], "samples": [156, 160], "steps": [40, 41]}
    story.tell(Event.EPISODE_DIAGNOSED, step=70, reason="gone without its samples", fields=fields)
    closed = story.tell(Event.EPISODE_CLOSED, step=70, fields={"episode": "e3"})
    story.found("grad_outlier", step=90, asks="record")
    told = incident_of(story.entries, "e3")
    assert told is not None
    assert (told["state"], told["cause"], told["ranks"], told["samples"]) == ("closed", "data", [1], [156, 160])
    assert told["seqs"] == [3, closed.seq]
    assert 8 not in [one["seq"] for one in told["findings"]]


def test_its_file_is_renewed_by_each_line_that_moves_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_NAME, clock=ManualClock(), by="rank 0")

    def tell(event: Event, **fields: object) -> Path | None:
        return write_incident(ledger.path, ledger.append(event, generation=1, attempt=1, step=41, reason="high", fields=fields))

    assert tell(Event.ANOMALY_FOUND, rule="sustained_loss", of_step=42) is None
    path = tell(Event.EPISODE_OPENED, onset_step=40, detected_step=42)
    assert path == tmp_path / "incidents" / "e2" / "incident.json"
    assert json.loads(path.read_text())["state"] == "open"
    assert tell(Event.CHECKPOINT_COMMITTED) is None
    assert tell(Event.EPISODE_CLOSED, episode="e2") == path
    assert json.loads(path.read_text())["state"] == "closed"
    assert tell(Event.EPISODE_CLOSED, episode="e99") is None


def test_a_place_that_cannot_be_written_to_stops_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_NAME, clock=ManualClock(), by="rank 0")
    (tmp_path / "incidents").write_text("a file where the folder should be")
    assert write_incident(ledger.path, ledger.append(Event.EPISODE_OPENED, generation=1, attempt=1, step=41)) is None
