"""`surefoot resume`: the one way on after a halt, ledgered with a name."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import NoReturn

import pytest

from surefoot.cli.main import run
from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.observe.ledger import Ledger, read_ledger

_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


@pytest.fixture
def halted(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=ManualClock(), by="rank 0")
    ledger.append(Event.RUN_HALTED, generation=1, attempt=1, step=7, rule="skips", reason="NaN")
    return tmp_path


def test_a_halted_run_is_released_in_the_name_of_a_person(halted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    assert run(["resume", str(halted), "--cause", "bad shard"]) == 0
    released = read_ledger(halted / "ledger.jsonl")[-1]
    assert (released.event, released.by, released.reason, released.step) == ("run.released", "ada", "bad shard", 7)


def test_a_user_without_a_name_is_a_number(halted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number of its own."""

    def nobody(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert run(["resume", str(halted), "--cause", "bad shard"]) == 0
    assert read_ledger(halted / "ledger.jsonl")[-1].by.startswith("uid ")


def test_a_run_that_is_not_halted_gets_no_entry(halted: Path) -> None:
    assert [run(["resume", str(halted)]) for _ in range(2)] == [0, 0]
    assert len(read_ledger(halted / "ledger.jsonl")) == 2


def test_a_folder_without_a_ledger_is_no_run(tmp_path: Path) -> None:
    assert run(["resume", str(tmp_path)]) == 2
