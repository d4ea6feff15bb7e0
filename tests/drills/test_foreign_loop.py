"""examples/foreign_loop.py: somebody else's loop, killed in the middle, ends with the bits of an undisturbed run."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.config import load_config
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import read_ledger, verify_ledger

SCRIPT = Path(__file__).parents[2] / "examples" / "foreign_loop.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # steps of a millisecond: two threads would mostly wait for each other


def run(run_dir: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(SCRIPT), f"run.dir={run_dir}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=ENV)


def ledger_of(run_dir: Path) -> list[LedgerEntry]:
    return read_ledger(run_dir / "ledger.jsonl")


def kill_after_a_commit(run_dir: Path, *overrides: str) -> None:
    process = subprocess.Popen([sys.executable, str(SCRIPT), f"run.dir={run_dir}", *overrides], stdout=subprocess.DEVNULL, env=ENV)
    try:
        deadline_s = time.monotonic() + 90
        while not any(entry.event == "checkpoint.committed" for entry in ledger_of(run_dir)):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline_s, "no commit within 90 s"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)


def test_it_imports_nothing_of_our_loop() -> None:
    imported = {node.module for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.ImportFrom)}
    assert "surefoot" in imported
    assert not any(str(name).startswith("surefoot.") for name in imported)


def test_a_killed_foreign_loop_ends_with_the_same_bits(tmp_path: Path) -> None:
    many = "train.num_steps=400"
    undisturbed = run(tmp_path / "undisturbed", many)
    assert undisturbed.returncode == 0, undisturbed.stderr
    kill_after_a_commit(tmp_path / "killed", many)
    again = run(tmp_path / "killed", many)
    assert again.returncode == 0, again.stderr
    entries = ledger_of(tmp_path / "killed")
    resumed = [entry for entry in entries if entry.event == "run.resumed"]
    assert len(resumed) == 1
    assert resumed[0].step > 0
    assert verify_ledger(tmp_path / "killed" / "ledger.jsonl").ok
    assert [entry.event for entry in entries if entry.event.startswith(("lock.", "run.created"))] == ["run.created", "lock.taken_over"]
    assert load_config(tmp_path / "killed").config.train.num_steps == 400
    digest = entries[-1].fields["state_digest"]
    assert digest == ledger_of(tmp_path / "undisturbed")[-1].fields["state_digest"]
    control = run(tmp_path / "control", many, "run.seed=8")
    assert control.returncode == 0, control.stderr
    assert digest != ledger_of(tmp_path / "control")[-1].fields["state_digest"]


def test_it_leaves_with_75_when_told_and_goes_on(tmp_path: Path) -> None:
    endless = "train.num_steps=100000"
    process = subprocess.Popen([sys.executable, str(SCRIPT), f"run.dir={tmp_path / 'run'}", endless], env=ENV)
    try:
        deadline_s = time.monotonic() + 90
        while not ledger_of(tmp_path / "run"):
            assert time.monotonic() < deadline_s, "not started within 90 s"
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 75
    finally:
        process.kill()
        process.wait(timeout=30)
    events = [entry.event for entry in ledger_of(tmp_path / "run")]
    events = [
        event for event in events if event not in ("checkpoint.verified", "checkpoint.retired")
    ]  # nobody waits for them on the way out
    assert events[-2:] == ["checkpoint.committed", "run.left"]


@pytest.mark.timeout(200)
def test_it_runs_under_stock_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = run(tmp_path / "run", "train.num_steps=60", launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert ledger_of(tmp_path / "run")[-1].event == "run.finished"
