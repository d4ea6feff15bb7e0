"""What ranks must have alike, and how one that differs is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from surefoot.core.sections import LaunchSection, MonitorSection, RunConfig, RunSection
from surefoot.guard.agreeing import rank_facts, refusal
from surefoot.guard.state import TrainState
from surefoot.tensors.world import single_world
from tests.steerable import Points

CONFIG = RunConfig(run=RunSection(name="alike"))


def _facts(config: RunConfig = CONFIG) -> dict[str, object]:
    model = nn.Linear(2, 2)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), data=Points())
    return rank_facts(state, config=config, world=single_world())


def test_ranks_that_are_alike_are_not_refused() -> None:
    assert refusal([_facts(), _facts(), _facts()]) is None


def test_another_seed_is_told_by_rank_and_value() -> None:
    error = refusal([_facts(), _facts(), _facts(replace(CONFIG, run=RunSection(name="alike", seed=7)))])
    assert error is not None
    assert error.what == "rank 2 has run.seed 7, rank 0 has 0"
    assert (error.where, error.values["ranks"], error.values["fields"]) == ("rank 2 of 3", (2,), ("run.seed",))


def test_rank_0_can_be_the_odd_one() -> None:
    error = refusal([_facts(replace(CONFIG, run=RunSection(name="alike", seed=7))), _facts(), _facts()])
    assert error is not None
    assert error.what == "rank 0 has run.seed 7, rank 1 has 0"


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (replace(CONFIG, monitor=MonitorSection(audit_interval_steps=7)), "monitor.audit_interval_steps"),
        (replace(CONFIG, launch=LaunchSection(collective_limit_s=7.0)), "launch.collective_limit_s"),
    ],
)
def test_what_decides_who_takes_part_in_a_collective_counts(other: RunConfig, field: str) -> None:
    error = refusal([_facts(), _facts(other)])
    assert error is not None
    assert error.values["fields"] == (field,)


def test_threads_and_settings_of_nccl_count_and_names_of_a_host_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = _facts()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert refusal([usual, _facts()]) is None
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    error = refusal([usual, _facts()])
    assert error is not None
    assert error.what == "rank 1 has NCCL_ALGO Tree, rank 0 has nothing"
    error = refusal([usual, {**usual, "num_threads": 99}])
    assert error is not None
    assert error.values["fields"] == ("num_threads",)


def test_many_differences_are_counted() -> None:
    error = refusal([{f"fact {index}": 0 for index in range(5)}, {f"fact {index}": 1 for index in range(5)}])
    assert error is not None
    assert error.what.endswith("; and 2 more")
