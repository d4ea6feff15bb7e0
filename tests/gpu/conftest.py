"""Tests that need a GPU. They are left out aloud where there is none; `scripts/gpu-checks` runs them and ends with 1 there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    ModelSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TrainSection,
)
from tests.texts import prepare_documents

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once per process, and deterministic kernels ask for it


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here: this was NOT checked")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def restored_determinism() -> Iterator[None]:
    """A run of ours asks for deterministic kernels process-wide."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_documents(tmp_path_factory.mktemp("text"))


@pytest.fixture
def config(data_dir: Path, tmp_path: Path) -> RunConfig:
    """A run of six steps that saves after every second one."""
    return RunConfig(
        run=RunSection(name="gpu", dir=str(tmp_path / "run"), seed=11),
        data=DataSection(path=str(data_dir), seq_len=64),
        model=ModelSection(num_layers=2, d_model=64, num_heads=4),
        train=TrainSection(num_steps=6, global_batch_size=12, micro_batch_size=3, eval_interval_steps=3, eval_num_samples=8),
        schedule=ScheduleSection(kind="constant", warmup_steps=2),
        checkpoint=CheckpointSection(interval_steps=2, keep_last=3),
    )
