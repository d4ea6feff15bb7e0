"""Stacks out of what faulthandler writes, asked of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.launch.logs import stacks_path
from surefoot.launch.processes import cgroup_memory, descendants, look_at, memory_of, name_of
from surefoot.launch.stacks import Frame, ThreadStack, ask_stacks, hottest, parse_stacks

TOLD = """\
Thread 0x00007fc0f83856c0 (most recent call first):
  File "/lib/threading.py", line 982 in run

Current thread 0x00007fc0f8deeb80 (most recent call first):
  File "a b.py", line 6 in inner
  File "<string>", line 7 in <module>
"""
BUSY = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGRTMIN + 1, file=open(sys.argv[1], "ab"), all_threads=True)
def loop():
    print("ready", flush=True)
    while True:
        pass
loop()
"""
IDLE = "import signal; print('ready', flush=True); signal.pause()"
Started = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    children: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        path = stacks_path(tmp_path, 1, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_frames_are_read_innermost_first_and_the_main_thread_last() -> None:
    other, main = parse_stacks(TOLD)
    assert other.frames == (Frame("/lib/threading.py", 982, "run"),)
    assert main.frames == (Frame("a b.py", 6, "inner"), Frame("<string>", 7, "<module>"))
    assert parse_stacks("") == ()


def test_the_hottest_lines_are_shares_of_all_samples() -> None:
    at = {line: (ThreadStack("", (Frame("f", line, "g"),)),) for line in (1, 2)}
    assert hottest([at[1], at[1], at[2], ()], num_lines=1) == [(Frame("f", 1, "g"), 0.5)]
    assert hottest([], num_lines=1) == []


def test_a_busy_loop_answers_and_goes_on(tmp_path: Path, started: Started) -> None:
    child = started(BUSY)
    for _ in range(2):  # each time only what is new
        (answer,) = ask_stacks(tmp_path, 1, {0: child.pid}, limit_s=20.0)
        assert answer.why == ""
        assert [frame.function for frame in answer.threads[-1].frames] == ["loop", "<module>"]
    assert child.poll() is None


def test_a_stopped_process_is_told_by_the_kernel(tmp_path: Path, started: Started) -> None:
    child = started(BUSY)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    (answer,) = ask_stacks(tmp_path, 1, {0: child.pid}, limit_s=0.1)
    assert answer.threads == ()
    assert "did not answer within 0.1 s" in answer.why
    assert answer.process.state == "T"
    assert "stopped" in answer.process.words


def test_who_has_no_handler_is_not_asked_and_lives(tmp_path: Path, started: Started) -> None:
    child = started(IDLE)
    (answer,) = ask_stacks(tmp_path, 1, {0: child.pid}, limit_s=0.1)
    assert "not registered" in answer.why
    assert child.poll() is None
    child.kill()
    child.wait()
    (answer,) = ask_stacks(tmp_path, 1, {0: child.pid}, limit_s=0.1)
    assert (answer.why, answer.process.words) == ("is gone", "gone")


def test_memory_and_children_are_those_of_the_kernel(started: Started) -> None:
    child = started(IDLE)
    view = memory_of(child.pid)
    assert view is not None
    assert 0 < view.anonymous_bytes < view.rss_bytes <= view.peak_bytes
    assert child.pid in [pid for pid, _ in descendants(os.getpid())]
    assert name_of(child.pid).startswith("python")
    for _ in range(100_000):  # it has said that it is ready, and goes to sleep next
        if look_at(child.pid).state == "S":
            break
    assert look_at(child.pid).state == "S"
    limit, use = cgroup_memory(child.pid)
    assert limit is None or use is None or limit >= 0
    child.kill()
    child.wait()
    assert memory_of(child.pid) is None
