"""Several nodes of one run, each an agent of its own with an address of its own on the loopback interface.

Nothing here is a node but a process tree with a name: what a cut cable does to a real one is for the campaigns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.core import strict_json
from surefoot.core.records import LedgerEntry
from surefoot.launch.coordinator_wire import read_contact
from surefoot.observe.ledger import read_ledger, verify_ledger
from tests.drills.live_job import CONFIG, write_texts

LIMIT_S = 90.0  # against a hang
MARK = "SUREFOOT_TEST_NODES"


class Nodes:
    """A run in `folder` and the nodes that were started of it, by name."""

    def __init__(self, folder: Path, *, nodes: str, num_ranks: int, num_steps: int = 100_000) -> None:
        self.folder, self.run_dir, self.mark = folder, folder / "run", f"{folder}"
        exact = '[optimizer]\nkernel = "foreach"\n[numerics]\nsums = "exact"\n'
        text = CONFIG.replace("dp_replicate = 2", f"dp_replicate = {num_ranks}").replace("num_steps = 100000", f"num_steps = {num_steps}")
        text = text.replace("global_batch_size = 4\nmicro_batch_size = 2", "global_batch_size = 6\nmicro_batch_size = 1")
        text = text.replace("interval_steps = 50", "interval_steps = 10")
        (folder / "run.toml").write_text(exact + text.replace("[launch]", f'[launch]\nnodes = "{nodes}"'))
        write_texts(folder / "text")
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        own = {MARK: self.mark, "SUREFOOT_NODE_NAME": f"n{number}", "SUREFOOT_NODE_ADDRESS": f"127.0.0.{number + 1}"}
        with (self.folder / f"said{number}").open("wb") as said:
            self.agents[f"n{number}"] = subprocess.Popen(
                [sys.executable, "-m", "surefoot.cli.main", "train", "run.toml"],
                cwd=self.folder, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=said, stderr=said, process_group=0,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        agent = self.agents.pop(name)
        agent.kill()
        agent.wait()

    def entries(self, *events: str) -> list[LedgerEntry]:
        path = self.run_dir / "ledger.jsonl"
        return [entry for entry in read_ledger(path) if entry.event in events] if path.exists() else []

    def until(self, look: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + LIMIT_S
        while not look():
            assert time.monotonic() < give_up_s, self.told()
            time.sleep(0.02)

    def saved(self, *, generation: int) -> bool:
        return any(entry.generation == generation for entry in self.entries("checkpoint.committed"))

    def runs_with(self, num_nodes: int, *, after: int = 0) -> bool:
        """Whether a generation after `after` has so many nodes, is the newest, and has saved."""
        started = self.entries("generation.started")
        if not started or started[-1].generation <= after or started[-1].fields["num_nodes"] != num_nodes:
            return False
        return self.saved(generation=started[-1].generation)

    def generation(self) -> int:
        return self.entries("generation.started")[-1].generation

    def leader(self) -> str:
        """The node that started the newest generation."""
        pid = self.entries("generation.started")[-1].fields["agent_pid"]
        return next(name for name, agent in self.agents.items() if agent.pid == pid)

    def told(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-1500:] for path in [*self.folder.glob("said*"), *self.run_dir.glob("logs/*.log")]
        )

    def leave(self) -> dict[str, int]:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        return {name: agent.wait(LIMIT_S) for name, agent in self.agents.items()}

    def marked(self) -> list[int]:
        """Every process that was started of this run, whoever its parent is by now."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


@pytest.fixture
def nodes_of(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(**facts: Any) -> Nodes:
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        made.append(Nodes(folder, **facts))
        return made[-1]

    yield make
    for job in made:
        for pid in job.marked():
            os.kill(pid, signal.SIGKILL)
        for agent in job.agents.values():
            agent.wait()


def test_a_node_that_dies_with_its_agent_is_noticed_and_the_rest_go_on(nodes_of: Callable[..., Nodes]) -> None:
    job = nodes_of(nodes="1:2", num_ranks=2)
    job.start(1)
    job.start(2)
    job.until(lambda: job.runs_with(2))  # the later one may join a run of one node
    lost, generation = job.leader(), job.generation()
    job.kill(lost)
    job.until(lambda: job.runs_with(1, after=generation))
    (decided,) = job.entries("restart.decided")
    assert f"node {lost}" in decided.reason
    taken = job.entries("lock.taken_over")[-1]
    assert (taken.generation, taken.fields["generation"]) == (generation, generation)  # it comes before the line that fences
    assert verify_ledger(job.run_dir / "ledger.jsonl").ok
    assert set(job.leave().values()) == {75}


@pytest.mark.campaign
def test_a_coordinator_that_dies_costs_no_step_and_a_node_that_comes_late_makes_the_run_grow(nodes_of: Callable[..., Nodes]) -> None:
    job = nodes_of(nodes="1:3", num_ranks=3)
    job.start(1)
    job.start(2)
    job.until(lambda: job.runs_with(2))
    generation, num_started = job.generation(), len(job.entries("generation.started"))
    contact = read_contact(job.run_dir)
    assert contact is not None
    os.kill(contact.pid, signal.SIGKILL)
    job.until(lambda: (now := read_contact(job.run_dir)) is not None and now.epoch > contact.epoch)
    time.sleep(6)  # longer than a node goes unheard before it fences itself
    assert len(job.entries("generation.started")) == num_started
    job.start(3)
    job.until(lambda: job.runs_with(3, after=generation))
    assert job.entries("restart.decided") == []  # growing is no fault: the budget pays nothing
    assert set(job.leave().values()) == {75}


def last_digest(job: Nodes, *, loses_one: bool) -> object:
    for number in (1, 2, 3):
        job.start(number)
    job.until(lambda: job.runs_with(3))
    num_started = len(job.entries("generation.started"))
    if loses_one:
        job.kill(next(name for name in job.agents if name != job.leader()))
    assert {agent.wait(LIMIT_S) for agent in job.agents.values()} == {0}, job.told()
    assert (len(job.entries("generation.started")) > num_started) == loses_one
    return job.entries("checkpoint.committed")[-1].fields["state_digest"]


@pytest.mark.campaign
def test_a_run_that_loses_a_node_ends_with_the_bits_of_one_that_loses_none(nodes_of: Callable[..., Nodes]) -> None:
    undisturbed = nodes_of(nodes="1:3", num_ranks=3, num_steps=400)
    assert last_digest(undisturbed, loses_one=False) == last_digest(nodes_of(nodes="1:3", num_ranks=3, num_steps=400), loses_one=True)


@pytest.mark.campaign
def test_a_node_whose_coordinator_is_silent_kills_its_own_ranks(nodes_of: Callable[..., Nodes]) -> None:
    job = nodes_of(nodes="2", num_ranks=2)
    job.start(1)
    job.start(2)
    job.until(lambda: job.runs_with(2))
    generation = job.generation()
    contact = read_contact(job.run_dir)
    assert contact is not None
    os.kill(contact.pid, signal.SIGSTOP)
    try:
        job.until(lambda: job.told().count("has killed its own ranks") >= 2)
    finally:
        os.kill(contact.pid, signal.SIGCONT)
    job.until(lambda: job.runs_with(2, after=generation))
    job.leave()


def test_a_wire_carries_every_instruction() -> None:
    from surefoot.launch.coordinator_wire import Instruct, decode, encode

    message = Instruct("n", 3, "restart", "why", "node", 0, 1.5)
    assert decode(encode(message)) == message
    assert strict_json.loads(encode(message))["kind"] == "instruct"
