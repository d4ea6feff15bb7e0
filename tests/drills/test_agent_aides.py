"""Aides of the agent and the memory that it holds for the ranks, over kills, generations and ends."""

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

KEEPER = {"behaviour": "good", "keeps_slots": True}


def said(agent: Any, event: str) -> list[dict[str, Any]]:
    path: Path = agent.run_dir / "aide.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [facts for facts in map(json.loads, lines) if facts["event"] == event]


def aide_pid(agent: Any, *, start: int = 1) -> int:
    def look() -> int | None:
        began = said(agent, "began")
        return int(began[start - 1]["pid"]) if len(began) >= start else None

    return int(agent.until(look))


def kill_a_rank(agent: Any, *, generation: int) -> None:
    os.kill(agent.stepping(generation=generation, step=3).ranks[1].pid, signal.SIGKILL)


def test_it_is_there_before_the_ranks_drains_between_generations_and_leaves_at_the_end(start_agent: StartAgent) -> None:
    agent = start_agent(aides=(KEEPER,))
    kill_a_rank(agent, generation=1)
    assert agent.wait() == 0
    (began,) = said(agent, "began")
    assert began["generation"] == 1
    assert [entry.fields["toy_pid"] for entry in agent.entries("generation.started")] == [began["pid"]] * 2
    assert [drain["generation"] for drain in said(agent, "drain")] == [2, 3]
    assert [left["pid"] for left in said(agent, "left")] == [began["pid"]]
    assert agent.entries("aide.lost") == []


def test_ranks_find_what_those_before_them_left_in_memory_and_nothing_leaks(start_agent: StartAgent) -> None:
    """Descriptors of the agent, the nursery, the ranks and the aide are as many in the third generation as in the first."""
    agent = start_agent(slots=True, checkpoint={"num_slots": 3}, aides=(KEEPER,), num_steps=400)
    counts = []
    for generation in (1, 2, 3):
        live = agent.stepping(generation=generation, step=3)
        facts = [json.loads((agent.run_dir / f"slots_g{generation}_{rank}.json").read_text()) for rank in (0, 1)]
        for rank in (0, 1):
            assert facts[rank]["own"] == [[number, generation] for number in (0, 1, 2)]
            assert facts[rank]["num_slots"] == 6
        nursery = agent.entries("generation.started")[-1].fields["nursery_pid"]
        pids = (agent.process.pid, nursery, aide_pid(agent))
        agent.until(lambda pid=nursery: num_slot_fds(pid) == 0)
        counts.append(([num_slot_fds(pid) for pid in pids], [rank["num_fds"] for rank in facts], len(fds_of(nursery))))
        os.kill(live.ranks[generation % 2].pid, signal.SIGKILL)
    assert agent.wait() == 0
    assert counts[0][0] == [6, 0, 6]
    assert counts[0] == counts[1] == counts[2]


def fds_of(pid: int) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue  # closed since
    return found


def num_slot_fds(pid: int) -> int:
    return sum("surefoot-slot" in target for target in fds_of(pid))


def test_without_the_memory_tier_ranks_are_handed_nothing(start_agent: StartAgent) -> None:
    agent = start_agent(aides=(KEEPER, {"behaviour": "good"}), checkpoint={"tiers": ["disk"]}, num_steps=10)
    assert agent.wait() == 0
    (began,) = said(agent, "began")  # whoever keeps slots has none to keep
    assert began["slots"] is None


def test_one_that_is_killed_is_started_again(start_agent: StartAgent) -> None:
    agent = start_agent(aides=(KEEPER,), num_steps=300)
    agent.stepping(step=3)
    os.kill(aide_pid(agent), signal.SIGKILL)
    assert aide_pid(agent, start=2) != aide_pid(agent)
    kill_a_rank(agent, generation=1)
    assert agent.wait() == 0
    (lost,) = agent.entries("aide.lost")
    assert (lost.reason, lost.fields["name"], lost.fields["signal"]) == ("the toy was killed by SIGKILL", "toy", signal.SIGKILL)
    assert [drain["pid"] for drain in said(agent, "drain")] == [aide_pid(agent, start=2)] * 2
    assert len(agent.entries("generation.started")) == 2


def test_one_that_cannot_live_is_given_up_and_stops_nothing(start_agent: StartAgent) -> None:
    agent = start_agent(aides=({"behaviour": "exit:3", "keeps_slots": True},), launch={"max_restarts": 2}, num_steps=300)
    agent.until(lambda: len(agent.entries("aide.lost")) == 3)
    assert agent.wait() == 0
    reasons = {entry.reason for entry in agent.entries("aide.lost")}
    assert reasons == {"the toy left with exit code 3; last words: no good, says the aide"}
    assert [entry.fields["wait_s"] is None for entry in agent.entries("aide.lost")] == [False, False, True]
    (failed,) = agent.entries("save.failed")
    assert (failed.rule, failed.reason) == ("drain", "there is no toy any more")


def test_a_drain_that_fails_is_said_and_the_ranks_start_again(start_agent: StartAgent, is_alive: IsAlive) -> None:
    """One that is stopped cannot drain: it is killed, and the next one begins with the next generation."""
    agent = start_agent(aides=(KEEPER,), checkpoint={"upload_limit_s": 1.0})
    agent.stepping(step=3)
    os.kill(aide_pid(agent), signal.SIGSTOP)
    kill_a_rank(agent, generation=1)
    assert agent.wait() == 0
    failed = agent.entries("save.failed")[0]
    assert (failed.rule, failed.reason) == ("drain", "the toy was not done within 1 s and was killed")
    assert "what the ranks staged may be lost" in (agent.run_dir / "agent.log").read_text()
    assert not is_alive(aide_pid(agent))
    assert [began["generation"] for began in said(agent, "began")] == [1, 2]
    assert len(agent.entries("generation.started")) == 2


def test_what_a_drain_came_short_of_is_ledgered(start_agent: StartAgent) -> None:
    agent = start_agent(aides=({"behaviour": "short", "keeps_slots": True},), num_steps=10)
    assert agent.wait() == 0
    assert [entry.reason for entry in agent.entries("save.failed")] == ["half of it is missing"]


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_with_the_agent(start_agent: StartAgent, is_alive: IsAlive, stopped: bool) -> None:
    agent = start_agent(aides=(KEEPER,), num_steps=100_000)
    agent.stepping()
    pid = aide_pid(agent)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    agent.process.kill()
    agent.wait()
    agent.until(lambda: not is_alive(pid), limit_s=10.0)


def test_what_it_started_ends_with_it(start_agent: StartAgent, is_alive: IsAlive) -> None:
    agent = start_agent(aides=({"behaviour": "parent"},), num_steps=300)
    child = int(agent.until(lambda: said(agent, "child") or None)[0]["pid"])
    os.kill(aide_pid(agent), signal.SIGKILL)
    agent.until(lambda: not is_alive(child), limit_s=10.0)
    second = int(agent.until(lambda: said(agent, "child")[1:] or None)[0]["pid"])
    assert agent.wait() == 0
    assert not is_alive(second)


def test_one_that_does_not_leave_is_killed(start_agent: StartAgent, is_alive: IsAlive) -> None:
    agent = start_agent(aides=({"behaviour": "deaf", "end_limit_s": 0.5},), num_steps=10)
    assert agent.wait() == 0
    assert not is_alive(aide_pid(agent))


def test_signals_for_the_job_pass_it_by_and_leaving_does_not_wait_for_one_that_needs_a_finished_run(
    start_agent: StartAgent, is_alive: IsAlive
) -> None:
    late = {"behaviour": "deaf", "only_when_finished": True, "end_limit_s": 1000.0}
    agent = start_agent(aides=(late,), num_steps=100_000)
    agent.stepping()
    pid = aide_pid(agent)
    os.kill(pid, signal.SIGTERM)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert agent.entries("aide.lost") == []
    assert not is_alive(pid)


def test_a_finished_run_is_finished_whatever_is_asked_while_it_waits_for_the_last_aide(start_agent: StartAgent, is_alive: IsAlive) -> None:
    late = {"behaviour": "deaf", "only_when_finished": True, "end_limit_s": 1000.0}
    agent = start_agent(aides=(late,), num_steps=10)
    pid = aide_pid(agent)
    agent.until(lambda: (agent.run_dir / "saved").exists() and (agent.run_dir / "saved").read_text() == "10")
    agent.until(lambda: not any(is_alive(int(pid)) for pid in children_of(agent.process.pid) if pid != aide_pid(agent)))
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 0
    assert not is_alive(pid)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
