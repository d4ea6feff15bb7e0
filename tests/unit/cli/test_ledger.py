from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.cli.main import run
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.observe.ledger import Ledger


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of five entries whose fourth is the position of its newest checkpoint."""
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=ManualClock(), by="agent")
    for step in range(1, 6):
        entry = ledger.append(
            Event.UPDATE_SKIPPED, generation=1, attempt=1, step=step, rule="nonfinite", reason="NaN", fields={"loss": step}
        )
        if step == 4:
            folder = tmp_path / "checkpoints" / "s4-a1"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text(json.dumps({"ledger_seq": entry.seq, "ledger_hash": entry.hash, "id": "s4-a1"}))
    return tmp_path


def test_json_prints_the_entries_as_they_are(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", str(run_dir), "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


def test_tail_prints_the_last_entries(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", str(run_dir), "--tail", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert " ".join(lines[1].split()) == "5 2026-01-01T00:00:00.000Z g1 a1 step 5 update.skipped nonfinite NaN loss=5 (agent)"


def test_verify_passes_on_a_whole_ledger(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", str(run_dir), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "ok": True, "entries": 5, "first_bad": None, "detail": ""}
    assert run(["ledger", str(run_dir), "--verify"]) == 0
    assert "ok: 5 entries" in capsys.readouterr().out


def test_verify_fails_on_a_tail_cut_below_the_newest_checkpoint(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert run(["ledger", str(run_dir), "--verify", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["entries"], answer["first_bad"]) == (False, 3, 4)
    assert run(["ledger", str(run_dir), "--verify"]) == 1
    assert "bad at entry 4" in capsys.readouterr().out


@pytest.mark.parametrize("option", [[], ["--verify"], ["--json"]])
def test_what_is_no_run_is_bad_usage(tmp_path: Path, option: list[str]) -> None:
    (tmp_path / "lock").write_text("of something else")
    assert run(["ledger", str(tmp_path / "gone"), *option]) == 2
    assert run(["ledger", str(tmp_path), *option]) == 2


def test_a_run_that_is_being_made_has_an_empty_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock.acquire(tmp_path, job="j", clock=ManualClock(), lease_s=30.0):
        assert run(["ledger", str(tmp_path)]) == 0
    (tmp_path / "config.toml").write_text("")
    assert run(["ledger", str(tmp_path), "--verify"]) == 0
    assert "ok: 0 entries" in capsys.readouterr().out


def test_a_ledger_that_was_removed_is_missed_by_the_checkpoints(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "ledger.jsonl").unlink()
    assert run(["ledger", str(run_dir), "--verify"]) == 1
    assert "the tail is cut" in capsys.readouterr().out
