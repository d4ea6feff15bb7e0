"""`surefoot sweep run` that is asked to leave between two runs: nothing is begun any more, and the same command goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from surefoot.cli.main import run
from surefoot.cli.sweep_folder import Point, SweepFolder, write_sweep
from surefoot.core import strict_json
from surefoot.core.clock import SystemClock
from surefoot.core.errors import EXIT_RETRY
from surefoot.core.holder import LOCK_NAME, LockRecord, this_process

LIMIT_S = 20.0  # against a hang


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the sweep starts in place of `python -m surefoot.cli.main`: each command is a line here, and a branch takes its time."""
    record = tmp_path / "commands"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$3 $4" >> {record}\n[ "$3" = train ] && exit 9\nsleep 0.4\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return record


def sweep_of_one(path: Path, *, parent: str = "") -> SweepFolder:
    point = Point("one", budget_flops=1.0, flops=1.0, trained_flops=1.0, tokens=1.0, n=1, num_steps=2, parent=parent, branch_step=1)
    folder = SweepFolder(path, "isoflop", (point,), {"max_flops": 2.0})
    write_sweep(folder, {})
    return folder


def asked_to_leave_once(there: Path) -> threading.Thread:
    def ask() -> None:
        give_up_s = time.monotonic() + LIMIT_S
        while not there.exists() and time.monotonic() < give_up_s:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def told(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_run_is_not_begun_after_a_request_to_leave_during_its_branch(tmp_path: Path, commands: Path, is_asked: bool) -> None:
    sweep_of_one(tmp_path / "sweep", parent=str(tmp_path / "another"))
    asking = asked_to_leave_once(commands) if is_asked else None
    code = run(["sweep", "run", str(tmp_path / "sweep")])
    if asking is not None:
        asking.join()
    assert [line.split()[0] for line in told(commands)] == (["checkpoint"] if is_asked else ["checkpoint", "train"])
    assert code == (EXIT_RETRY if is_asked else 1)


def test_a_run_that_another_process_trains_is_not_waited_for_after_a_request_to_leave(tmp_path: Path, commands: Path) -> None:
    folder = sweep_of_one(tmp_path / "sweep")
    lock = folder.run_dir("one") / LOCK_NAME
    lock.parent.mkdir(parents=True)
    held = LockRecord(job="another", holder=this_process(), generation=1, renewed_at=SystemClock().utc(), lease_s=60.0)
    lock.write_text(strict_json.dumps(held.as_json()))
    asking = asked_to_leave_once(lock)
    assert run(["sweep", "run", str(folder.path)]) == EXIT_RETRY
    asking.join()
    assert told(commands) == []
