"""The canary and losses per source where the stages of a pipeline share the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.records import HeldOutLoss
from surefoot.core.sections import CanarySection, DataSection, LaunchSection, ModelSection, ParallelSection, RunConfig, TrainSection
from surefoot.tensors.process_group import connected
from surefoot.train.build import build_parts
from tests.three_sources import SOURCES, prepare_three

RunRanks = Callable[..., list[Any]]


def canary_of(*, rank: int, world_size: int, config: RunConfig) -> HeldOutLoss | None:
    with connected(config.launch) as world:
        return build_parts(config, world).evaluation.canary()


def test_a_pipeline_has_the_canary_of_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    config = RunConfig(
        data=DataSection(path=str(prepare_three(tmp_path / "three")), seq_len=32),
        model=ModelSection(num_layers=2, d_model=32, num_heads=2),
        train=TrainSection(global_batch_size=6, micro_batch_size=3, eval_num_samples=5),
        canary=CanarySection(num_tokens=9 * 32, interval_steps=1000),
        launch=LaunchSection(threads_per_rank=1),
    )
    (alone,) = run_ranks(canary_of, 1, init=False, config=config)
    assert sorted(alone.per_source) == sorted(SOURCES)
    staged = replace(config, parallel=ParallelSection(pp=2))
    found, other = run_ranks(canary_of, 2, init=False, config=staged)  # only the last stage sees a loss
    assert found == other
    assert found.num_tokens == alone.num_tokens
    assert found.loss == pytest.approx(alone.loss, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=1e-5)
    assert found.per_source == {name: pytest.approx(loss, rel=1e-5) for name, loss in alone.per_source.items()}
