"""Putting a generation down when nobody ever said which ranks were forked: the kernel's word comes from the pipe that they all hold."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.coordinate.beats import BeatBoard
from surefoot.core.clock import SystemClock
from surefoot.core.errors import SurefootError
from surefoot.core.sections import LaunchSection, ObserveSection
from surefoot.launch.crew import Crew
from surefoot.launch.ending import Ending
from surefoot.launch.generation import Post, put_down
from surefoot.launch.logs import Echo, open_generation
from surefoot.launch.signals import LeaveSignals
from surefoot.launch.trim import LogTrimmer
from surefoot.launch.warm import WarmNursery
from surefoot.launch.watch import Watch

LOST = Ending("failed", "the nursery was killed by SIGKILL", what="nursery")


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Post]:
    clock = SystemClock()
    open_generation(tmp_path, 1, keep=1)
    echo = Echo(lambda _: None)
    nursery = WarmNursery(entry="none:main", warm=(), log_path=tmp_path / "nursery.log", kill_limit_s=1.0)
    with LeaveSignals() as signals:
        watch = Watch(signals, clock=clock, on_look=lambda: None)
        trimmer = LogTrimmer(tmp_path, max_bytes=1_000_000)
        yield Post(tmp_path, LaunchSection(), ObserveSection(), clock, watch, nursery, echo, trimmer)
    trimmer.close()
    echo.close()


@pytest.fixture
def crew_of() -> Iterator[Callable[[str], tuple[Crew, subprocess.Popen[bytes]]]]:
    """A crew that was never told its pids, and the one process of it: `sleep` for so long."""
    made: list[tuple[Crew, subprocess.Popen[bytes]]] = []

    def make(sleep_s: str) -> tuple[Crew, subprocess.Popen[bytes]]:
        life_fd, ranks_life_fd = os.pipe2(os.O_CLOEXEC)
        process = subprocess.Popen(["sleep", sleep_s], pass_fds=(ranks_life_fd,))
        os.close(ranks_life_fd)
        crew = Crew(BeatBoard.create(1, generation=1), life_fd=life_fd, clock=SystemClock())
        made.append((crew, process))
        return made[-1]

    yield make
    for crew, process in made:
        crew.close()
        process.kill()
        process.wait()


CrewOf = Callable[[str], tuple[Crew, subprocess.Popen[bytes]]]


def test_it_returns_when_the_last_one_is_gone(post: Post, crew_of: CrewOf) -> None:
    crew, process = crew_of("2")
    ending = put_down(post, crew, LOST)
    assert process.wait(1.0) == 0
    assert ending == replace(LOST, evidence=post.run_dir / "incidents" / "g1.json")
    assert ending.evidence is not None
    assert ending.evidence.exists()


def test_one_that_does_not_die_is_said(post: Post, crew_of: CrewOf) -> None:
    crew, _ = crew_of("60")
    post = replace(post, launch=LaunchSection(kill_limit_s=1.0))
    with pytest.raises(SurefootError, match="the ranks of a nursery that named none did not die within 1 s"):
        put_down(post, crew, LOST)


def test_evidence_that_could_not_be_written_is_not_pointed_to(post: Post, crew_of: CrewOf) -> None:
    (post.run_dir / "incidents").write_text("in the way")
    assert put_down(post, crew_of("0")[0], LOST).evidence is None
