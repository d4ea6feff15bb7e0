"""What the end of a run says about its last checkpoint: no more than the ledger knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.cli.main import run
from surefoot.cli.trust import how_far_trusted
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, Rung
from surefoot.observe.ledger import Ledger


@pytest.mark.parametrize(
    ("rung", "read_back", "damaged", "word", "verb"),
    [
        (Rung.COMMITTED, False, False, "committed: ", "verify"),
        (Rung.COMMITTED, True, False, "read back: ", "prove"),
        (Rung.LOADABLE, False, False, "loadable: ", "prove"),
        (Rung.LOADABLE, True, False, "loadable: ", "prove"),
        (Rung.PROVEN, True, False, "proven: ", "verify"),
        (Rung.COMMITTED, True, True, "damaged, ", "verify"),
        (Rung.PROVEN, True, True, "damaged, ", "verify"),
    ],
)
def test_the_most_that_is_known_and_the_command_that_goes_further(rung: Rung, read_back: bool, damaged: bool, word: str, verb: str) -> None:
    ref = CheckpointRef("s10-a1", 10, 1, None, "sf1:0", 100, rung=rung, read_back=read_back, damaged=damaged)
    line = how_far_trusted(ref, command="surefoot", run="runs/short")
    assert line.startswith(f"s10-a1 is {word}")
    assert f"`surefoot checkpoint {verb} runs/short`" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("event", "word"), [(None, "committed"), (Event.CHECKPOINT_VERIFIED, "read back"), (Event.CHECKPOINT_DAMAGED, "damaged")]
)
def test_status_has_the_words_of_the_end_of_a_run(
    tmp_path: Path, event: Event | None, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=SystemClock(), by="agent")
    fields = {"id": "s4-a1", "step": 4, "attempt": 1, "parent": None, "state_digest": "d", "num_bytes": 10}
    ledger.append(Event.CHECKPOINT_COMMITTED, generation=1, attempt=1, step=4, fields=fields)
    if event is not None:
        ledger.append(event, generation=1, attempt=1, step=4, fields={"id": "s4-a1", "problems": []})
    (tmp_path / "config.toml").write_text("")
    assert run(["status", str(tmp_path)]) == 0
    assert f"s4-a1 ({word})" in capsys.readouterr().out
