"""An incident as the ledger tells it, and its file."""

from __future__ import annotations

import json
from pathlib import Path

from surefoot.core.events import Event
from surefoot.guard.incident import write_incident
from surefoot.heal.incident import episode_ids, incident_of
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


def test_its_file_is_written_anew_each_time(tmp_path: Path) -> None:
    story = story_of_an_episode()
    path = write_incident(tmp_path, story.entries, episode="e3")
    assert path == tmp_path / "incidents" / "e3" / "incident.json"
    assert json.loads(path.read_text())["state"] == "open"
    story.tell(Event.EPISODE_CLOSED, fields={"episode": "e3"})
    write_incident(tmp_path, story.entries, episode="e3")
    assert json.loads(path.read_text())["state"] == "closed"
    assert write_incident(tmp_path, story.entries, episode="e4") is None
    (tmp_path / "other").write_text("")
    assert write_incident(tmp_path / "other", story.entries, episode="e3") is None  # a place that cannot be written to stops nothing
