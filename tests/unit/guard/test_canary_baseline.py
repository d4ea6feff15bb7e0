"""What a canary is compared with: the best of the same set, through a resume, and nothing once the set is another."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.core.records import HeldOutLoss
from surefoot.core.sections import CanarySection, CheckpointSection, RunConfig, RunSection, TrainSection
from surefoot.guard import Guard
from surefoot.observe.ledger import read_ledger


class Points:
    next_sample = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.next_sample += 4
        return torch.ones(4, 8)

    def cursor(self) -> Mapping[str, Any]:
        return {"next_sample": self.next_sample}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]


class Sets:
    """Somebody's evaluation, on a set of `num_tokens`."""

    def __init__(self, loss: float, *, num_tokens: int) -> None:
        self._told = HeldOutLoss(loss, bits_per_byte=1.0, num_tokens=num_tokens)

    def held_out(self) -> HeldOutLoss | None:
        return None

    def canary(self) -> HeldOutLoss | None:
        return self._told


def train(run_dir: Path, sets: Sets, *, num_steps: int) -> set[str]:
    """The rules of all that was found."""
    config = RunConfig(
        run=RunSection(dir=str(run_dir)),
        train=TrainSection(num_steps=12),
        canary=CanarySection(interval_steps=1, num_in_a_row=2),
        checkpoint=CheckpointSection(interval_steps=1, prove=False),
    )
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    points = Points()
    with suppress(SystemExit), Guard(config, model=model, optimizer=optimizer, data=points, evaluation=sets) as guard:
        guard.restore()
        while guard.begin():
            loss = model(next(points)).square().sum()
            loss.backward()
            if guard.judge(loss, 4).proceeds:
                optimizer.step()
                guard.applied()
            optimizer.zero_grad()
            guard.finish()
            if guard.step >= num_steps:
                os.kill(os.getpid(), signal.SIGTERM)  # what was seen until here is saved before it leaves
    return {entry.rule for entry in read_ledger(run_dir / "ledger.jsonl") if entry.event == "anomaly.found"}


def test_the_same_set_is_held_to_its_best_after_a_resume_and_another_one_is_not(tmp_path: Path) -> None:
    for name, num_tokens in (("same", 100), ("other", 60)):
        assert train(tmp_path / name, Sets(1.0, num_tokens=100), num_steps=6) == set()
        found = train(tmp_path / name, Sets(1.5, num_tokens=num_tokens), num_steps=11)
        assert ("canary_rise" in found) is (name == "same")
