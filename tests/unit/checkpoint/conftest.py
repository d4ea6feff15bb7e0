"""A small training whose checkpoints the tests of this folder make, damage and load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.state import collect
from surefoot.core.records import Manifest
from surefoot.tensors.world import World, single_world

EXTRAS = {"cursor": {"next_sample": 7, "count": 3}, "monitor": {"in_a_row": 0}}


@dataclass
class Training:
    """Linear layers with a buffer, under AdamW; `step` updates with random gradients."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()
        self.optimizer.zero_grad()


def new_training(*, width: int = 5, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2, bias=False))
    return Training(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def new_draft(name: str = "s10-a1", *, loss: float | None = 2.5, generation: int = 1) -> Manifest:
    return Manifest(
        format_version=1,
        id=name,
        run="test",
        step=10,
        attempt=1,
        generation=generation,
        parent=None,
        time_utc="2026-01-01T00:00:00.000Z",
        loss=loss,
        tokens=1000,
        state_digest="",
        config_hashes={"model": "00"},
        data_hash="11",
        code_version="0",
        topology={"dp_replicate": 1},
        environment={"torch": "x"},
        ledger_seq=4,
        ledger_hash="22",
        cursor={},
        files=(),
        tensors=(),
    )


@pytest.fixture
def world() -> World:
    return single_world()


@pytest.fixture
def make_training() -> Callable[..., Training]:
    return new_training


@pytest.fixture
def make_draft() -> Callable[..., Manifest]:
    return new_draft


@pytest.fixture
def training() -> Training:
    trained = new_training()
    trained.step()
    return trained


@pytest.fixture
def committed(tmp_path: Path, training: Training, world: World) -> Path:
    """The folder of a checkpoint of `training`, published."""
    root = tmp_path / "checkpoints"
    save(root, new_draft(), state=collect(training.model, training.optimizer), extras=EXTRAS, world=world)
    return root / "s10-a1"
