"""Restarts with real torch and real gloo: stock torchrun on one store failed 9 times of 14."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


def test_ten_restarts_in_a_row_all_meet_again(start_agent: Callable[..., Any]) -> None:
    agent = start_agent(entry="toy_gloo:main", warm=("torch", "torch.distributed", "toy_gloo"))
    assert agent.wait(limit_s=100.0) == 0
    lost = agent.entries("rank.lost")
    assert [(entry.generation, entry.fields["rank"], entry.fields["signal"]) for entry in lost] == [
        (generation, 1, signal.SIGKILL) for generation in range(1, 11)
    ]
    assert (agent.run_dir / "met").read_text() == "11"
    assert len({entry.fields["nursery_pid"] for entry in agent.entries("generation.started")}) == 1
