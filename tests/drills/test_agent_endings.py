"""How a run under the agent ends when its workers fail: restarts, their limits, and exit codes with the worker's own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

StartAgent = Callable[..., Any]


def test_a_rank_that_never_starts_is_ended(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=10, faults={"1": {"1": "stuck"}}, launch={"init_limit_s": 1.0})
    assert agent.wait() == 0
    (lost,) = agent.entries("rank.lost")
    assert lost.rule == "init-deadline"
    assert len(agent.entries("generation.started")) == 2


@pytest.mark.parametrize("code", [4, 6])
def test_what_a_worker_says_about_the_run_ends_it(start_agent: StartAgent, code: int) -> None:
    agent = start_agent(faults={"1": {"1": f"complain:{code}"}})
    assert agent.wait() == code
    assert agent.error()["what"] == f"code {code}, says rank 1"
    assert (agent.error()["where"], agent.error()["hint"]) == ("the toy", "mend the toy")
    assert len(agent.entries("generation.started")) == 1
    assert agent.entries("rank.lost")[0].fields["exit_code"] == code


def test_exit_codes_without_words(start_agent: StartAgent) -> None:
    agent = start_agent(faults={"1": {"0": "exit:4"}})
    assert agent.wait() == 4
    assert "rank 0" in agent.error()["what"]


def test_a_stop_that_the_group_agreed_on(start_agent: StartAgent) -> None:
    agent = start_agent(faults={"1": {"0": "exit:6", "1": "exit:6"}})
    assert agent.wait() == 6
    assert [entry.event for entry in agent.entries()] == ["generation.started", "restart.decided"]
    assert not (agent.run_dir / "incidents").exists()


def test_a_deterministic_stop_that_the_group_agreed_on_points_to_what_exists(start_agent: StartAgent) -> None:
    agent = start_agent(faults={"1": {"0": "exit:93", "1": "exit:93"}})
    assert agent.wait() == 93
    assert agent.error()["what"].startswith("every rank left with exit code 93")
    assert agent.error()["hint"] == f"evidence: {agent.run_dir}/logs/g1"


def test_a_rank_that_hangs_after_the_last_step_is_restarted(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=5, faults={"1": {"1": "endless"}}, launch={"end_limit_s": 1.0})
    assert agent.wait() == 0
    (lost,) = agent.entries("rank.lost")
    assert lost.reason.startswith("rank 0 is done, but 1 s later not rank 1")
    assert len(agent.entries("generation.started")) == 2


def test_a_crash_is_restarted(start_agent: StartAgent) -> None:
    agent = start_agent(faults={"1": {"0": "raise"}})
    assert agent.wait() == 0
    assert agent.entries("rank.lost")[0].fields["exit_code"] == 1
    assert [entry.fields["kind"] for entry in agent.entries("restart.decided")] == ["restart"]


def test_restarts_without_progress_end_with_93(start_agent: StartAgent) -> None:
    agent = start_agent(faults={str(generation): {"0": "stuck", "1": "stuck"} for generation in range(1, 9)}, launch={"init_limit_s": 1.0})
    assert agent.wait() == 93
    assert len(agent.entries("generation.started")) == 4


def test_used_up_restarts_end_with_1_and_the_last_words(start_agent: StartAgent) -> None:
    agent = start_agent(
        num_steps=10_000, faults={str(generation): {"1": "raise"} for generation in range(1, 9)}, launch={"max_restarts": 2}
    )
    assert agent.wait() == 1
    assert "ValueError: the toy is broken" in agent.error()["what"]
    assert len(agent.entries("generation.started")) == 3


def test_modules_that_cannot_be_imported(start_agent: StartAgent) -> None:
    agent = start_agent(warm=("toy_warm", "no_such_module"))
    assert agent.wait() == 1
    assert "No module named 'no_such_module'" in agent.error()["what"]
    assert agent.entries() == []


def test_a_rank_that_takes_all_its_peers_with_it_is_blamed(start_agent: StartAgent) -> None:
    agent = start_agent(num_ranks=4, faults={"1": {"0": "exit:1", "1": "exit:75", "2": "complain:75", "3": "complain:75"}})
    assert agent.wait() == 0
    assert agent.entries("rank.lost")[0].fields["rank"] == 0
