"""Real training that loses a rank or whose program is wrong: who is blamed, how it is graded, and what becomes of the run."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.observe.live import read_live
from tests.drills.live_job import CONFIG, LiveJob

HERE = Path(__file__).parent
THREE = (
    CONFIG.replace("num_steps = 100000", "num_steps = 60")
    .replace("global_batch_size = 4", "global_batch_size = 6")
    .replace("dp_replicate = 2", "dp_replicate = 3")
    .replace("[model]", '[model]\nfactory = "wrong_model:build"')
    .replace("[launch]", '[launch]\nlimits = "fixed"\nstep_limit_s = 3.0')
)
Start = Callable[..., LiveJob]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[LiveJob] = []

    def begin(name: str, wrong: dict[str, Any] | None = None) -> LiveJob:
        (tmp_path / name).mkdir()
        environment = {"PYTHONPATH": str(HERE), "WRONG": json.dumps(wrong or {}), "SUREFOOT_DRILL_MARK": str(tmp_path)}
        jobs.append(LiveJob(tmp_path / name, config=THREE, environment=environment))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def processes_of(mark: Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"SUREFOOT_DRILL_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def incident_of(job: LiveJob, generation: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.dir / "incidents" / f"g{generation}.json").read_text())
    return found


@pytest.mark.campaign
def test_a_killed_rank_is_blamed_and_the_run_ends_with_the_bits_of_an_undisturbed_one(start: Start, tmp_path: Path) -> None:
    struck = random.randrange(3)
    job = start("killed")
    job.until(lambda: (live := read_live(job.dir)) is not None and len(live.ranks) == 3 and live.step > 20)
    live = read_live(job.dir)
    assert live is not None
    os.kill(live.ranks[struck].pid, signal.SIGKILL)
    job.until(lambda: job.entries("recovery.measured"))
    (lost,), (decided,), (measured,) = (job.entries(name) for name in ("rank.lost", "restart.decided", "recovery.measured"))
    assert (lost.fields["ranks"], lost.fields["cause"], lost.fields["confidence"]) == ([struck], "killed", "certain")
    assert (decided.fields["grade"], decided.fields["wait_s"]) == ("process", 0.0)
    assert incident_of(job)["culprit"]["ranks"] == [struck]
    split = measured.fields["recovery"]
    assert isinstance(split, dict)
    print(f"recovery: {split}")
    assert split["total_s"] == pytest.approx(sum(value for name, value in split.items() if name != "total_s"), abs=0.01)
    assert job.ended()[0] == 0
    sound = start("sound")
    assert sound.ended()[0] == 0
    (once,), (never,) = job.entries("run.finished"), sound.entries("run.finished")
    assert once.fields["state_digest"] == never.fields["state_digest"]
    assert processes_of(tmp_path) == []


def test_a_collective_that_the_others_do_not_call_stops_the_run_and_names_both_sides(start: Start, tmp_path: Path) -> None:
    odd = random.randrange(3)
    job = start("mismatched", {"barrier": [odd, 8]})
    code, said = job.ended()
    assert code == 93, said
    (lost,) = job.entries("rank.lost")
    assert lost.fields["cause"] == "mismatched-collective"
    assert (lost.fields["ranks"], lost.fields["candidates"]) == ([odd], [rank for rank in range(3) if rank != odd])
    assert "barrier" in lost.reason
    assert " while ranks " in lost.reason
    assert job.entries("restart.decided")[-1].rule == "deterministic"
    assert processes_of(tmp_path) == []


def test_what_fails_twice_at_a_step_stops_the_run(start: Start) -> None:
    job = start("broken", {"raise": [1, 5]})
    code, said = job.ended()
    assert code == 93, said
    assert [entry.fields["kind"] for entry in job.entries("restart.decided")] == ["restart", "stop"]
    fingerprints = {str(entry.fields["fingerprint"]) for entry in job.entries("rank.lost")}
    assert len(fingerprints) == 1
    assert next(iter(fingerprints)).startswith("ValueError at wrong_model.py:")
    assert "came twice" in said
