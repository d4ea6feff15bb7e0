"""The uploader beside ranks that stage in memory: whatever is killed, what was staged whole is committed, and nothing is half published."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.readback import verify_files

StartAgent = Callable[..., Any]
IsAlive = Callable[[int], bool]

LARGE = 96 << 20  # written for so long that a poll meets it half way
RUN = """
[run]
name = "run"
dir = "."
[train]
num_steps = 10
[checkpoint]
keep_last = 2
"""  # no detector looks farther back than a run is long, and so no older one is kept for one
UPLOADER = {"program": "surefoot.cli.uploader", "name": "uploader", "keeps_slots": True}


@pytest.fixture
def start(start_agent: StartAgent, tmp_path: Path) -> Callable[..., Any]:
    """start(num_steps=..., save_every=..., image_bytes=..., faults={...}): an agent with the real uploader."""

    def begin(**facts: Any) -> Any:
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "config.toml").write_text(RUN)
        return start_agent(**{"entry": "toy_saver:main", "aides": (UPLOADER,), "save_every": 10, "image_bytes": 8192, **facts})

    return begin


def commits(agent: Any) -> list[str]:
    return [str(entry.fields["id"]) for entry in agent.entries("checkpoint.committed")]


def check_folder(agent: Any) -> None:
    """Everything that is published verifies, and nothing else is there."""
    root: Path = agent.run_dir / "checkpoints"
    assert sorted(entry.name for entry in root.iterdir()) == sorted(published(root))
    for name in published(root):
        assert verify_files(root / name) == []


def uploader_pid(agent: Any) -> int:
    def look() -> int | None:
        children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text().split()
        return next((int(pid) for pid in children if "surefoot.cli.uploader" in Path(f"/proc/{pid}/cmdline").read_text()), None)

    return int(agent.until(look))


def stop_in_mid_upload(agent: Any) -> int:
    """Its pid, stopped after it began to write and before it was done. It gets to run a little at a time, so that this is not too late."""
    pid = uploader_pid(agent)
    root: Path = agent.run_dir / "checkpoints"

    def look() -> bool:
        os.kill(pid, signal.SIGCONT)
        slice_end_s = time.monotonic() + 0.01
        while not (begun := list(root.glob(".*.writing/__*"))) and time.monotonic() < slice_end_s:
            continue
        os.kill(pid, signal.SIGSTOP)
        return bool(begun)

    agent.until(look)
    assert list(root.glob(".*.writing")), "it was too quick: the image must be larger"
    return pid


def test_saves_are_committed_read_back_and_retired_outside_of_the_ranks(start: Callable[..., Any]) -> None:
    agent = start(num_steps=50)
    assert agent.wait() == 0
    assert commits(agent) == ["s10-a1", "s20-a1", "s30-a1", "s40-a1", "s50-a1"]
    assert [entry.fields["id"] for entry in agent.entries("checkpoint.verified")] == commits(agent)
    assert {entry.by for entry in agent.entries() if entry.event.startswith("checkpoint.")} == {"uploader"}
    assert published(agent.run_dir / "checkpoints") == ["s40-a1", "s50-a1"]
    assert [entry.fields["id"] for entry in agent.entries("checkpoint.retired")] == ["s10-a1", "s20-a1", "s30-a1"]
    check_folder(agent)


def test_one_killed_in_mid_upload_is_followed_by_one_that_begins_it_anew(start: Callable[..., Any]) -> None:
    agent = start(num_steps=200, save_every=100, image_bytes=LARGE)
    pid = stop_in_mid_upload(agent)
    assert commits(agent) == []
    os.kill(pid, signal.SIGKILL)
    assert agent.wait() == 0
    assert [entry.fields["name"] for entry in agent.entries("aide.lost")] == ["uploader"]
    assert commits(agent) == ["s100-a1", "s200-a1"]
    assert len(agent.entries("checkpoint.verified")) == 2
    check_folder(agent)


def test_one_killed_in_mid_upload_together_with_the_ranks(start: Callable[..., Any]) -> None:
    """The next uploader finishes for the dead ones before the next ranks begin."""
    agent = start(num_steps=190, save_every=100, image_bytes=LARGE, step_s=0.02)
    pid = stop_in_mid_upload(agent)
    live = agent.stepping(step=100)  # both have staged: what one of them still fills would die with it
    for victim in (pid, *(rank.pid for rank in live.ranks)):
        os.kill(victim, signal.SIGKILL)
    assert agent.wait() == 0
    assert commits(agent) == ["s100-a1"]
    second = agent.entries("generation.started")[1]
    assert agent.entries("checkpoint.committed")[0].seq < second.seq
    assert "generation 2 goes on from step 100" in (agent.run_dir / "agent.log").read_text()
    check_folder(agent)


def test_what_was_staged_whole_is_committed_before_the_next_ranks_begin(start: Callable[..., Any]) -> None:
    agent = start(num_steps=30, image_bytes=LARGE // 4, faults={"1": {"0": "die-staged", "1": "die-staged"}})
    assert agent.wait() == 0
    first = agent.entries("checkpoint.committed")[0]
    assert (first.fields["id"], first.generation) == ("s10-a1", 1)
    assert first.seq < agent.entries("generation.started")[1].seq
    assert "generation 2 goes on from step 10" in (agent.run_dir / "agent.log").read_text()
    check_folder(agent)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_stages_leaves_nothing(start: Callable[..., Any], rank: int) -> None:
    """Its slot can be filled again, and the part of the other rank is given up."""
    agent = start(num_steps=30, faults={"1": {str(rank): "die-staging"}})
    assert agent.wait() == 0
    assert commits(agent) == ["s10-a2", "s20-a2", "s30-a2"]
    assert f"slot 0 of rank {rank} was still being filled for s10-a1" in [entry.reason for entry in agent.entries("save.failed")]
    check_folder(agent)


def test_the_agent_killed_in_mid_upload_leaves_no_process(start: Callable[..., Any], is_alive: IsAlive) -> None:
    agent = start(num_steps=100_000, save_every=100, image_bytes=LARGE)
    pid = stop_in_mid_upload(agent)
    pids = [pid, *(rank.pid for rank in agent.stepping().ranks), agent.entries("generation.started")[0].fields["nursery_pid"]]
    agent.process.kill()
    agent.wait()
    agent.until(lambda: not any(is_alive(pid) for pid in pids), limit_s=10.0)
    assert published(agent.run_dir / "checkpoints") == []


def test_one_that_cannot_finish_does_not_keep_the_ranks_from_starting_again(start: Callable[..., Any]) -> None:
    """It is stopped for good. What it was about is given up, and the slot serves again."""
    agent = start(num_steps=150, save_every=100, image_bytes=LARGE, step_s=0.02, checkpoint={"upload_limit_s": 3.0})
    stop_in_mid_upload(agent)
    os.kill(agent.stepping().ranks[0].pid, signal.SIGKILL)
    assert agent.wait() == 0
    assert [entry.reason for entry in agent.entries("save.failed")] == ["the uploader was not done within 3 s and was killed"]
    assert commits(agent) == ["s100-a2"]
    assert "generation 2 goes on from step 0" in (agent.run_dir / "agent.log").read_text()
