"""What becomes of saves, told to a ledger that others write to as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.checkpoint.upload import Committed
from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.core.records import Manifest
from surefoot.core.sections import RunConfig, RunSection
from surefoot.guard.account import Account
from surefoot.observe.ledger import Ledger, read_ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl", clock=ManualClock(), by="uploader")


def begin_generation(ledger: Ledger, number: int) -> None:
    ledger.append(Event.GENERATION_STARTED, generation=number, attempt=1, step=0)


def account_of(ledger: Ledger, *, generation: Callable[[], int]) -> Account:
    return Account(ledger, config=RunConfig(run=RunSection(name="told")), root=ledger.path.parent / "checkpoints", generation=generation)


def commit(name: str = "s4-a1") -> Committed:
    manifest = Manifest(
        format_version=1, id=name, run="told", step=4, attempt=1, generation=1, parent=None, time_utc="", loss=None, tokens=0,
        state_digest="sf1:0", config_hashes={}, data_hash="", code_version="", topology={}, environment={}, ledger_seq=0, ledger_hash="",
        cursor={}, files=(), tensors=(),
    )  # fmt: skip
    return Committed(manifest, "every 4 steps", "here", 0.1)


def told(ledger: Ledger) -> list[tuple[str, int]]:
    return [(entry.event, entry.generation) for entry in read_ledger(ledger.path)]


def test_a_generation_that_begins_between_look_and_append_loses_no_entry(ledger: Ledger) -> None:
    begin_generation(ledger, 1)
    began: list[int] = []

    def newest() -> int:
        seen = read_ledger(ledger.path)[-1].generation
        if not began:
            began.append(2)
            begin_generation(ledger, 2)
        return seen

    account = account_of(ledger, generation=newest)
    account.committed(commit())
    assert told(ledger)[-1] == ("checkpoint.committed", 2)
    assert not account.is_fenced
    assert account.write()


def test_who_belongs_to_the_past_writes_nothing_and_knows_it(ledger: Ledger) -> None:
    begin_generation(ledger, 2)
    account = account_of(ledger, generation=lambda: 1)
    account.committed(commit())
    assert account.is_fenced
    assert told(ledger) == [("generation.started", 2)]


def test_what_cannot_be_written_now_is_written_later_in_order(ledger: Ledger) -> None:
    ledger.path.mkdir()  # as good as a full disk
    account = account_of(ledger, generation=lambda: 1)
    account.committed(commit("s4-a1"))
    account.committed(commit("s4-a1-r1"))
    assert not account.write()
    ledger.path.rmdir()
    assert account.write()
    assert [entry.fields["id"] for entry in read_ledger(ledger.path)] == ["s4-a1", "s4-a1-r1"]
