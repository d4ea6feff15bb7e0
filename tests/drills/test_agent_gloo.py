"""Restarts with real torch and real gloo: stock torchrun on one store failed 9 times of 14."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_ten_restarts_in_a_row_all_meet_again(start_agent: Callable[..., Any]) -> None:
    agent = start_agent(entry="toy_gloo:main", warm=("torch", "torch.distributed", "toy_gloo"))
    assert agent.wait(limit_s=100.0) == 0
    lost = agent.entries("rank.lost")
    assert [(entry.generation, entry.fields["rank"], entry.fields["signal"]) for entry in lost] == [
        (generation, 1, signal.SIGKILL) for generation in range(1, 11)
    ]
    assert (agent.run_dir / "met").read_text() == "11"
    assert len({entry.fields["nursery_pid"] for entry in agent.entries("generation.started")}) == 1


@pytest.mark.campaign
def test_a_hundred_restarts_in_a_row_all_meet_again_and_leave_nobody_behind(
    start_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOY_KILLED_GENERATIONS", "100")
    monkeypatch.setenv("SUREFOOT_DRILL_MARK", str(tmp_path))
    launch = {"max_restarts": 100, "window_restarts": 100}
    agent = start_agent(entry="toy_gloo:main", warm=("torch", "torch.distributed", "toy_gloo"), launch=launch)
    assert agent.wait(limit_s=500.0) == 0
    assert len(agent.entries("rank.lost")) == 100
    assert {tuple(entry.fields["ranks"]) for entry in agent.entries("rank.lost")} == {(1,)}
    assert (agent.run_dir / "met").read_text() == "101"
    assert len({entry.fields["nursery_pid"] for entry in agent.entries("generation.started")}) == 1
    marks = [path for path in Path("/proc").glob("[0-9]*/environ") if f"SUREFOOT_DRILL_MARK={tmp_path}".encode() in read(path)]
    assert marks == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
