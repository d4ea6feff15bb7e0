"""Requests to leave in every phase of the agent, and a console that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

StartAgent = Callable[..., Any]

FOREVER = 100_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_ranks_save_and_leave(start_agent: StartAgent, number: signal.Signals) -> None:
    agent = start_agent(num_steps=FOREVER)
    agent.stepping()
    agent.process.send_signal(number)
    assert agent.wait() == 75
    assert "left after step" in (agent.run_dir / "agent.log").read_text()
    assert [entry.event for entry in agent.entries()] == ["generation.started"]


def test_ctrl_c_reaches_the_agent_alone(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=FOREVER)
    live = agent.stepping()
    assert len({os.getpgid(pid) for pid in (agent.process.pid, *(rank.pid for rank in live.ranks))}) == 3
    os.killpg(agent.process.pid, signal.SIGINT)
    assert agent.wait() == 75
    assert [entry.event for entry in agent.entries()] == ["generation.started"]


def test_scheduler_signals_do_not_kill_ranks(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=FOREVER)
    live = agent.stepping()
    for rank in live.ranks:
        os.kill(rank.pid, signal.SIGUSR1)
        os.kill(rank.pid, signal.SIGTERM)
    agent.process.send_signal(signal.SIGUSR1)
    assert agent.wait() == 75
    assert [entry.event for entry in agent.entries()] == ["generation.started"]


def test_while_the_nursery_warms_up(start_agent: StartAgent) -> None:
    agent = start_agent(warm_s=1000)
    agent.until(lambda: (agent.run_dir / "logs" / "nursery.log").exists())
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    (left,) = agent.entries()
    assert left.event == "run.left"
    assert "before any rank" in left.reason


def test_while_the_ranks_start(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=FOREVER, faults={"1": {"0": "slow-start", "1": "slow-start"}})
    agent.until(lambda: agent.entries("generation.started") or None)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert "left after step 0" in (agent.run_dir / "agent.log").read_text()


def test_while_waiting_for_a_restart(start_agent: StartAgent) -> None:
    faults = {str(generation): {"0": "stuck", "1": "stuck"} for generation in range(1, 9)}
    agent = start_agent(faults=faults, launch={"restart_wait_s": 300.0, "init_limit_s": 1.0})
    agent.until(lambda: len(agent.entries("restart.decided")) == 2)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert agent.entries()[-1].event == "run.left"
    assert len(agent.entries("generation.started")) == 2


def test_who_does_not_leave_is_killed_after_the_grace(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=FOREVER, faults={"1": {"1": "deaf"}}, launch={"grace_s": 1.0})
    agent.stepping()
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert agent.entries()[-1].event == "run.left"
    assert "within 1 s" in agent.entries()[-1].reason


def test_second_interrupt_kills_at_once(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=FOREVER, faults={"1": {"0": "deaf", "1": "deaf"}})
    agent.stepping()
    agent.process.send_signal(signal.SIGINT)
    agent.until(lambda: "a second Ctrl-C" in (agent.run_dir / "agent.log").read_text())
    agent.process.send_signal(signal.SIGINT)
    assert agent.wait(limit_s=20.0) == 75
    assert "interrupted twice" in agent.entries()[-1].reason


def test_a_rank_that_dies_while_leaving_is_no_restart(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=FOREVER, faults={"1": {"0": "deaf", "1": "deaf"}})
    live = agent.stepping()
    agent.process.send_signal(signal.SIGTERM)
    agent.until(lambda: "SIGTERM" in (agent.run_dir / "agent.log").read_text())
    os.kill(live.ranks[0].pid, signal.SIGKILL)
    assert agent.wait() == 75
    assert [entry.event for entry in agent.entries()] == ["generation.started", "rank.lost", "run.left"]


def test_a_closed_console_stops_nothing(start_agent: StartAgent) -> None:
    agent = start_agent(faults={"1": {"0": "loud"}}, stdout=subprocess.PIPE)
    agent.process.stdout.close()
    assert agent.wait() == 0


def test_a_stuck_console_stops_nothing(start_agent: StartAgent) -> None:
    agent = start_agent(faults={"1": {"0": "loud"}}, stdout=subprocess.PIPE)
    with agent.process.stdout:
        assert agent.wait() == 0
    log: Path = agent.run_dir / "logs" / "g1" / "rank_0.log"
    assert log.stat().st_size > 1_000_000


def test_a_stuck_terminal_does_not_hold_up_the_agent(start_agent: StartAgent) -> None:
    """Nobody reads what the agent warns of: it restarts all the same, and ends when somebody does."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    os.write(write_fd, bytes(1 << 20))  # as much as it takes
    os.set_blocking(write_fd, True)
    agent = start_agent(num_steps=300, faults={"1": {"1": "exit:1"}}, stderr=write_fd)
    os.close(write_fd)
    agent.until(lambda: (agent.run_dir / "saved").exists() and (agent.run_dir / "saved").read_text() == "300")
    assert len(agent.entries("generation.started")) == 2
    with os.fdopen(read_fd, "rb") as terminal:
        assert b"restart 1 of 20" in terminal.read()
    assert agent.wait() == 0


def test_a_rank_that_says_too_much_does_not_fill_the_disk(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=600, faults={"1": {"0": "loud"}}, observe={"max_log_bytes": 100_000})
    assert agent.wait() == 0
    logs = agent.run_dir / "logs" / "g1"
    assert (logs / "rank_0.log.1").stat().st_size <= 2_000_000
    assert (logs / "rank_0.log").stat().st_size < 15_000_000  # it said 20 MB
