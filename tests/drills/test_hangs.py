"""Ranks of real training that live and do not move: stopped by a signal, or busy for ever, while the others wait in a collective."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.observe.live import read_live
from tests.drills.live_job import CONFIG, LiveJob

HERE = Path(__file__).parent
STEP_LIMIT_S = 4.0
SHORT = (
    CONFIG.replace("num_steps = 100000", "num_steps = 50")
    .replace("[model]", '[model]\nfactory = "hanging_model:build"')
    .replace("[launch]", f'[launch]\nlimits = "fixed"\nstep_limit_s = {STEP_LIMIT_S}\ntestimony_limit_s = 5.0')
)
Start = Callable[..., LiveJob]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[LiveJob] = []

    def begin(name: str, *, config: str = SHORT, hang: dict[str, object] | None = None) -> LiveJob:
        (tmp_path / name).mkdir()
        environment = {"PYTHONPATH": str(HERE), "HANG": json.dumps(hang or {}), "SUREFOOT_DRILL_MARK": str(tmp_path)}
        jobs.append(LiveJob(tmp_path / name, config=config, environment=environment))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def digest_of(job: LiveJob) -> str:
    code, said = job.ended()
    assert code == 0, said
    (finished,) = job.entries("run.finished")
    return str(finished.fields["state_digest"])


def marked_processes(mark: Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"SUREFOOT_DRILL_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_busy_rank_and_a_stopped_one_are_noticed_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    start: Start, tmp_path: Path
) -> None:
    """The undisturbed one dozes in an evaluation for longer than a step may take, which is no fault."""
    busy, stopped = random.randrange(2), random.randrange(2)
    hung = start("hung", hang={"spin": [busy, 6]})
    hung.until(lambda: hung.entries("rank.lost"))
    hung.until(lambda: (live := read_live(hung.dir)) is not None and live.generation == 2 and len(live.ranks) == 2 and live.step > 8)
    live = read_live(hung.dir)
    assert live is not None
    os.kill(live.ranks[stopped].pid, signal.SIGSTOP)
    hung_digest = digest_of(hung)
    first, second = hung.entries("rank.lost")
    assert (first.fields["rank"], second.fields["rank"]) == (busy, stopped), (first.reason, second.reason)
    alarms = [json.loads((hung.dir / f"incidents/g{number}.json").read_text())["alarm"] for number in (1, 2)]
    assert [alarm["kind"] for alarm in alarms] == ["silent", "stopped"]
    assert STEP_LIMIT_S < alarms[0]["age_s"] < STEP_LIMIT_S + 2.0
    assert "in count" in (hung.dir / f"logs/g1/rank_{busy}.stacks").read_text()
    assert not marked_processes(tmp_path)
    sound = start("sound", hang={"doze": [busy, STEP_LIMIT_S + 1.0]})
    assert digest_of(sound) == hung_digest
    assert not sound.entries("rank.lost")


@pytest.mark.campaign
def test_another_seed_ends_with_other_bits(start: Start) -> None:
    """Else equal digests would say nothing."""
    sound, other = start("sound"), start("other", config=SHORT.replace("[run]", "[run]\nseed = 5"))
    assert digest_of(sound) != digest_of(other)
