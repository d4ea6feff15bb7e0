"""Killing the group of a process that may be gone: what it left behind ends, a stranger that got its number does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from surefoot.launch.process import kill_group


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[str]]:
    """A leader of a group with one member more, whose pid it has printed; its stdout ends with the last of the two."""
    script = "import os, sys, time\npid = os.fork()\nif pid: print(pid, flush=True); sys.stdin.read()\nelse: time.sleep(1000)"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        yield process


def test_a_living_leader_ends_with_its_group(leader: subprocess.Popen[str]) -> None:
    assert leader.stdout is not None
    leader.stdout.readline()
    kill_group(leader.pid, pidfd=_pidfd(leader))
    assert leader.stdout.read() == ""
    assert leader.wait() == -signal.SIGKILL


def test_what_a_leader_left_behind_ends(leader: subprocess.Popen[str]) -> None:
    assert leader.stdout is not None
    leader.stdout.readline()
    pidfd = _pidfd(leader)
    leader.kill()
    leader.wait()
    kill_group(leader.pid, pidfd=pidfd)
    assert leader.stdout.read() == ""


def test_a_stranger_of_the_same_number_is_left_alone() -> None:
    with subprocess.Popen(["true"]) as gone:
        pidfd = _pidfd(gone)
    with subprocess.Popen(["sleep", "60"], process_group=0) as stranger:
        kill_group(stranger.pid, pidfd=pidfd)
        assert stranger.poll() is None
        stranger.kill()


def test_nobody_there() -> None:
    with subprocess.Popen(["true"], process_group=0) as gone:
        pidfd = _pidfd(gone)
    kill_group(gone.pid, pidfd=pidfd)


_OPENED: list[int] = []


@pytest.fixture(autouse=True)
def close_pidfds() -> Iterator[None]:
    yield
    while _OPENED:
        os.close(_OPENED.pop())


def _pidfd(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> int:
    _OPENED.append(os.pidfd_open(process.pid))
    return _OPENED[-1]
