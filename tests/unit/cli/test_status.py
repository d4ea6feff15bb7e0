from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.cli.main import run
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import ManualClock, SystemClock
from surefoot.core.events import Event
from surefoot.observe.ledger import Ledger
from surefoot.observe.live import LiveRecord, read_lock, write_live


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=ManualClock(), by="rank 0")
    fields = {"id": "s20-a1", "step": 20, "attempt": 1, "parent": None, "state_digest": "abcd", "num_bytes": 1}
    ledger.append(Event.CHECKPOINT_COMMITTED, generation=1, attempt=1, step=20, fields=fields)
    (tmp_path / "config.toml").write_text("[train]\nnum_steps = 100\n")
    return tmp_path


def test_json_is_one_object(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", str(run_dir), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema_version"], answer["step"], answer["state_digest"]) == (1, 20, "abcd")


def test_text_says_where_the_run_stands(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    for words in (f"{run_dir.name}  stopped", "20 of 100", "s20-a1 (committed)", "state abcd", "healthy"):
        assert words in printed


def test_a_missing_folder_is_bad_usage_in_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", str(tmp_path / "gone"), "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out or captured.err)["error"]["code"] == "config"


@pytest.mark.parametrize("verb", ["status", "ledger"])
def test_help_loads_neither_torch_nor_pyarrow(verb: str) -> None:
    script = f"""
import sys
from surefoot.cli.main import run
assert run(["{verb}", "--help"]) == 0
assert not {{"torch", "pyarrow", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_status_loads_no_torch(run_dir: Path) -> None:
    script = f"""
import sys
from surefoot.cli.main import run
assert run(["status", "{run_dir}"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_text_says_that_a_run_is_halted_and_why(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(run_dir / "ledger.jsonl", clock=ManualClock(), by="rank 0")
    ledger.append(Event.RUN_HALTED, generation=1, attempt=1, step=20, rule="skips_in_a_row", reason="4 updates in a row")
    assert run(["status", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    assert f"{run_dir.name}  halted" in printed
    assert "at step 20 by skips_in_a_row: 4 updates in a row" in printed


def test_text_says_who_paused_a_live_run_and_how_it_goes_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(run_dir / "ledger.jsonl", clock=ManualClock(), by="rank 0")
    ledger.append(Event.RUN_PAUSED, generation=1, attempt=1, step=20, rule="pause", fields={"by": "ada@here"})
    assert run(["status", str(run_dir)]) == 0
    assert f"`surefoot resume {run_dir}` releases it, `surefoot train {run_dir}` goes on then" in capsys.readouterr().out
    with RunLock.acquire(run_dir, job="job", clock=SystemClock(), lease_s=30.0):
        lock = read_lock(run_dir)
        assert lock is not None
        live = LiveRecord(lock.holder.pid, lock.holder.host, 1, 1, "stopped", 20, (), lock.renewed_at, 0)
        write_live(run_dir, live)
        assert run(["status", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    assert f"{run_dir.name}  paused" in printed
    assert "paused      at step 20 by ada@here: no reason was given, since 2" in printed
    assert f"; `surefoot resume {run_dir}` goes on\n" in printed


def test_text_says_what_the_next_start_was_asked_for(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(run_dir / "ledger.jsonl", clock=ManualClock(), by="ada")
    ledger.append(Event.RESUME_ASKED, generation=1, attempt=1, step=20, fields={"id": "s20-a1"})
    assert run(["status", str(run_dir)]) == 0
    assert f"next start  from s20-a1, as ada asked: `surefoot train {run_dir}`" in capsys.readouterr().out
