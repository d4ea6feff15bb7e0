from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.coordinate.beats import BeatBoard
from surefoot.core.records import Phase
from surefoot.guard import testifying  # its functions by their module: pytest would take them for tests
from surefoot.guard.beating import Watched, be_watched, beat_micro_step, in_phase
from surefoot.guard.testifying import Answering
from surefoot.tensors.world import Exchanges


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[BeatBoard]:
    monkeypatch.setattr(Exchanges, "tell", None)
    monkeypatch.setattr(Watched, "slot", None)
    made = BeatBoard.create(1, generation=1)
    yield made
    made.close()


def test_without_an_agent_nothing_is_said(board: BeatBoard) -> None:
    beat_micro_step(3)
    with in_phase(Phase.SAVE):
        assert board.read(0).num_beats == 0
    assert Exchanges.tell is None


def test_the_loop_moves(board: BeatBoard) -> None:
    slot = board.slot(0)
    be_watched(slot)
    slot.beat(phase=Phase.STEP)
    beat_micro_step(3)
    assert board.read(0).micro_step == 3
    with in_phase(Phase.DATA):
        assert board.read(0).phase is Phase.DATA
    assert board.read(0).phase is Phase.STEP


def test_an_error_leaves_the_phase_that_it_came_from(board: BeatBoard) -> None:
    be_watched(board.slot(0))

    def fail() -> None:
        with in_phase(Phase.SAVE):
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert board.read(0).phase is Phase.SAVE


def test_a_call_is_answered_once_the_thread_looks(board: BeatBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "thread", None)
    path = tmp_path / "rank_0.testimony.json"
    testifying.testify(board, path)
    assert json.loads(path.read_text())["call"] == 0
    assert [thread.name for thread in threading.enumerate()].count("testimony") == 1
    call = board.call_for_testimony()
    until_s = time.monotonic() + 20.0
    while (told := json.loads(path.read_text()))["call"] != call:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert told["groups"] == []


def test_no_agent_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "thread", None)
    monkeypatch.delenv("SUREFOOT_BEATS_FD", raising=False)
    testifying.testify_to_agent()
    assert Answering.thread is None
