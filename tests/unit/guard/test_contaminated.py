"""The report on what an incident got into, from a ledger and metrics as a run writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.guard.contaminated import write_contamination
from surefoot.observe.ledger import Ledger


def _ledger(folder: Path, *, steps: tuple[int, ...] = (10, 20, 30)) -> Ledger:
    ledger = Ledger(folder / "ledger.jsonl", clock=ManualClock(), by="rank 0")
    _append(ledger, Event.ATTEMPT_STARTED, {"checkpoint": None}, step=0)
    parent = None
    for step in steps:
        fields = {"id": f"s{step}-a1", "step": step, "attempt": 1, "parent": parent, "state_digest": "", "bytes": 1}
        _append(ledger, Event.CHECKPOINT_COMMITTED, fields, step=step)
        parent = f"s{step}-a1"
    return ledger


def _append(ledger: Ledger, event: Event, fields: dict[str, Any], *, step: int, rule: str = "") -> LedgerEntry:
    return ledger.append(event, generation=1, attempt=1, step=step, rule=rule, fields=fields)


def test_an_episode_that_opens_has_its_report(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path)
    entry = _append(ledger, Event.EPISODE_OPENED, {"onset_step": 21, "detected_step": 31}, step=31, rule="replica_differs")
    path = write_contamination(ledger.path, entry)
    assert path == tmp_path / "incidents" / f"e{entry.seq}" / "contamination.json"
    report = json.loads(path.read_text())
    assert (report["window"], report["affected"], report["clean"]) == ([21, 31], ["s30-a1"], ["s10-a1", "s20-a1"])
    assert (report["choice"]["id"], report["choice"]["cost_steps"], report["proposal"]) == ("s20-a1", 11, "go back to s20-a1")
    assert not report["salvage"]["may_be_kept"]
    page = path.with_suffix(".md").read_text()
    assert "- checkpoints that hold them: s30-a1\n" in page
    assert "- cost of going back: 11 steps\n" in page


def test_a_cause_that_is_named_moves_the_window(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path)
    opened = _append(ledger, Event.EPISODE_OPENED, {"onset_step": 21, "detected_step": 31}, step=31)
    episode = f"e{opened.seq}"
    named = _append(ledger, Event.EPISODE_DIAGNOSED, {"episode": episode, "cause": "data", "steps": [9, 31]}, step=60)
    path = write_contamination(ledger.path, named)
    assert path is not None
    assert path.parent.name == episode
    report = json.loads(path.read_text())
    assert (report["window"], report["choice"]) == ([9, 31], None)
    assert report["proposal"] == "start anew: no clean checkpoint is left"


def test_what_was_saved_after_the_roll_back_is_no_part_of_it(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path)
    opened = _append(ledger, Event.EPISODE_OPENED, {"onset_step": 21, "detected_step": 31}, step=31)
    ledger.append(Event.RUN_ROLLED_BACK, generation=1, attempt=2, step=20, fields={"checkpoint": "s20-a1"})
    again = {"id": "s30-a2", "step": 30, "attempt": 2, "parent": "s20-a1", "state_digest": "", "bytes": 1}
    ledger.append(Event.CHECKPOINT_COMMITTED, generation=1, attempt=2, step=30, fields=again)
    named = {"episode": f"e{opened.seq}", "cause": "state", "steps": [21, 31]}
    path = write_contamination(ledger.path, ledger.append(Event.EPISODE_DIAGNOSED, generation=1, attempt=2, step=55, fields=named))
    assert path is not None
    report = json.loads(path.read_text())
    assert (report["affected"], report["choice"]["cost_steps"]) == (["s30-a1"], 11)


def test_other_lines_write_nothing(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path)
    assert write_contamination(ledger.path, _append(ledger, Event.UPDATE_SKIPPED, {}, step=31)) is None
    assert not (tmp_path / "incidents").exists()


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path)
    (tmp_path / "incidents").write_text("in the way")
    entry = _append(ledger, Event.EPISODE_OPENED, {"onset_step": 21, "detected_step": 31}, step=31)
    assert write_contamination(ledger.path, entry) is None
