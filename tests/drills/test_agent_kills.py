"""kill -9 of everything that the agent supervises, and of the agent itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

StartAgent = Callable[..., Any]
IsAlive = Callable[[int], bool]


def test_nothing_happens_and_the_run_finishes(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=10)
    assert agent.wait() == 0
    assert [entry.event for entry in agent.entries()] == ["generation.started"]
    assert not (agent.run_dir / "incidents").exists()
    assert "generation 1 goes on from step 0" in (agent.run_dir / "agent.log").read_text()


def test_kill_a_rank(start_agent: StartAgent, is_alive: IsAlive) -> None:
    agent = start_agent()
    live = agent.stepping(step=5)
    os.kill(live.ranks[1].pid, signal.SIGKILL)
    assert agent.wait() == 0
    (lost,) = agent.entries("rank.lost")
    assert (lost.fields["rank"], lost.fields["signal"], lost.fields["exit_code"]) == (1, signal.SIGKILL, None)
    assert lost.step >= 5
    incident = json.loads((agent.run_dir / lost.fields["incident"]).read_text())
    assert incident["culprit"]["ranks"] == [1]
    assert [rank["alive"] for rank in incident["ranks"]] == [True, False]
    assert incident["ranks"][1]["last_beat"]["phase"] == "step"
    first, second = agent.entries("generation.started")
    assert (first.generation, second.generation) == (1, 2)
    assert first.fields["nursery_pid"] == second.fields["nursery_pid"]
    assert not is_alive(live.ranks[0].pid)


def test_kill_all_ranks(start_agent: StartAgent) -> None:
    agent = start_agent()
    for rank in agent.stepping(step=5).ranks:
        os.kill(rank.pid, signal.SIGKILL)
    assert agent.wait() == 0
    assert len(agent.entries("rank.lost")) == 1
    assert len(agent.entries("generation.started")) == 2


def test_segfault(start_agent: StartAgent) -> None:
    agent = start_agent(faults={"1": {"1": "segfault"}})
    assert agent.wait() == 0
    (lost,) = agent.entries("rank.lost")
    assert (lost.fields["rank"], lost.fields["signal"]) == (1, signal.SIGSEGV)
    assert any(
        "Segmentation fault" in line
        for line in json.loads((agent.run_dir / lost.fields["incident"]).read_text())["ranks"][1]["last_error_lines"]
    )


def test_kill_the_nursery(start_agent: StartAgent, is_alive: IsAlive) -> None:
    agent = start_agent()
    live = agent.stepping(step=5)
    os.kill(agent.entries("generation.started")[0].fields["nursery_pid"], signal.SIGKILL)
    assert agent.wait() == 0
    (lost,) = agent.entries("nursery.lost")
    assert (lost.fields["signal"], lost.reason) == (signal.SIGKILL, "the nursery was killed by SIGKILL")
    first, second = agent.entries("generation.started")
    assert first.fields["nursery_pid"] != second.fields["nursery_pid"]
    assert not any(is_alive(rank.pid) for rank in live.ranks)


def test_kill_the_nursery_while_it_warms_up(start_agent: StartAgent, is_alive: IsAlive) -> None:
    agent = start_agent(warm_s=1.0, num_steps=10)
    os.kill(agent.until(lambda: child_of(agent.process.pid)), signal.SIGKILL)
    assert agent.wait() == 0
    (lost,) = agent.entries("nursery.lost")
    assert (lost.reason, lost.fields["incident"]) == ("the nursery was killed by SIGKILL before it was ready", None)
    assert len(agent.entries("generation.started")) == 1
    assert "evidence" not in (agent.run_dir / "agent.log").read_text()


def test_evidence_is_of_the_ending_that_it_is_about(start_agent: StartAgent) -> None:
    """The second nursery is lost before there are ranks: nothing was written about that, and the first one's incident is not its own."""
    agent = start_agent(warm_s=1.0)
    agent.stepping(step=5)
    os.kill(agent.entries("generation.started")[0].fields["nursery_pid"], signal.SIGKILL)
    agent.until(lambda: agent.entries("restart.decided") or None)
    os.kill(agent.until(lambda: child_of(agent.process.pid)), signal.SIGKILL)
    assert agent.wait() == 0
    assert [lost.fields["incident"] for lost in agent.entries("nursery.lost")] == ["incidents/g1.json", None]
    assert (agent.run_dir / "agent.log").read_text().count("evidence: ") == 1


def test_a_nursery_that_is_late_was_not_killed_by_anybody(start_agent: StartAgent) -> None:
    agent = start_agent(warm_s=1000, launch={"init_limit_s": 1.0, "no_progress_limit": 1})
    assert agent.wait() == 93
    assert [(lost.fields["signal"], lost.fields["incident"]) for lost in agent.entries("nursery.lost")] == [(None, None)] * 2
    assert agent.error()["what"].startswith("the nursery was not ready within 1 s (step not known): no step")
    assert agent.error()["hint"] == f"evidence: {agent.run_dir}/logs/nursery.log"
    assert "signal" not in (agent.run_dir / "agent.log").read_text()


def test_a_stopped_nursery_does_not_hide_a_dead_rank(start_agent: StartAgent) -> None:
    agent = start_agent()
    live = agent.stepping(step=5)
    os.kill(agent.entries("generation.started")[0].fields["nursery_pid"], signal.SIGSTOP)
    os.kill(live.ranks[1].pid, signal.SIGKILL)
    assert agent.wait() == 0
    (lost,) = agent.entries("nursery.lost")
    assert lost.fields["signal"] is None  # we ended it
    assert agent.entries("restart.decided")[0].reason.startswith("a rank is gone and the nursery does not report it (step")


def workers_of(agent: Any) -> list[int]:
    return [int(agent.until(lambda rank=rank: read(agent.run_dir / f"worker_{rank}"))) for rank in (0, 1)]


WORKERS = {"1": {"0": "worker", "1": "worker"}}


def test_what_ranks_started_ends_with_them(start_agent: StartAgent, is_alive: IsAlive) -> None:
    agent = start_agent(faults=WORKERS)
    workers = workers_of(agent)
    os.kill(agent.stepping(step=5).ranks[1].pid, signal.SIGKILL)
    assert agent.wait() == 0
    assert not any(is_alive(pid) for pid in workers)


def test_what_ranks_started_ends_with_the_nursery(start_agent: StartAgent, is_alive: IsAlive) -> None:
    agent = start_agent(faults=WORKERS)
    workers = workers_of(agent)
    agent.stepping(step=5)
    os.kill(agent.entries("generation.started")[0].fields["nursery_pid"], signal.SIGKILL)
    assert agent.wait() == 0
    assert not any(is_alive(pid) for pid in workers)


@pytest.mark.parametrize("stopped", [False, True])
def test_what_ranks_started_ends_with_the_agent(start_agent: StartAgent, is_alive: IsAlive, stopped: bool) -> None:
    """Also when the nursery, which has to do it, is stopped at that moment."""
    agent = start_agent(num_steps=100_000, faults=WORKERS)
    live = agent.stepping()
    nursery = agent.entries("generation.started")[0].fields["nursery_pid"]
    pids = [nursery, *workers_of(agent), *(rank.pid for rank in live.ranks)]
    if stopped:
        os.kill(nursery, signal.SIGSTOP)
    agent.process.kill()
    agent.wait()
    agent.until(lambda: not any(is_alive(pid) for pid in pids), limit_s=10.0)


def test_kill_the_agent(start_agent: StartAgent, is_alive: IsAlive) -> None:
    agent = start_agent(num_steps=10_000)
    live = agent.stepping(step=5)
    pids = [agent.entries("generation.started")[0].fields["nursery_pid"], *(rank.pid for rank in live.ranks)]
    agent.process.kill()
    agent.wait()
    agent.until(lambda: not any(is_alive(pid) for pid in pids), limit_s=2.0)


def test_the_next_agent_goes_on(start_agent: StartAgent) -> None:
    agent = start_agent(num_steps=200)
    agent.stepping(step=5)
    agent.process.kill()
    agent.wait()
    agent = start_agent(num_steps=10)
    assert agent.wait() == 0
    assert [entry.generation for entry in agent.entries("generation.started")] == [1, 2]


def read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def child_of(pid: int) -> int | None:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = file.read().split()
    return int(children[0]) if children else None
