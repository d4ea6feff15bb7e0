"""Healthy runs that nothing may act on, in small; `python -m benchmarks.clean_runs` runs twenty longer ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.clean_runs import SETTINGS, acted_on, config_of, found_in, prepare_sources, train

from surefoot.core.sections import RunConfig
from surefoot.observe.ledger import read_ledger
from tests.ranks.injections.corpus import write_text

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    return prepare_sources(folder, code=str(write_text(folder)))


def run(*, rank: int, world_size: int, config: RunConfig, rounded: bool) -> None:
    train(config, rounded=rounded)


@pytest.mark.parametrize("name", ["rounded-to-bf16", "rare-source"])
def test_nothing_acts_on_a_healthy_run(name: str, run_ranks: RunRanks, data: Path, tmp_path: Path) -> None:
    setting = next(setting for setting in SETTINGS if setting.name == name)
    config = config_of(setting, data=str(data), run_dir=str(tmp_path / "run"), seed=3, num_steps=200)
    config = replace(config, train=replace(config.train, global_batch_size=6 if setting.num_ranks > 1 else 4))
    run_ranks(run, setting.num_ranks, init=False, config=config, rounded=setting.rounded)
    entries = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert acted_on(entries) == []
    assert entries[-1].event == "run.finished"
    assert found_in(tmp_path / "run")["steps"] == 200
