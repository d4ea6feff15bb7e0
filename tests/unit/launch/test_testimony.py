"""Real processes are asked what they know: a busy one, a stopped one, one that cannot answer."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.coordinate.beats import BeatBoard
from surefoot.core.clock import SystemClock
from surefoot.launch.crew import Crew
from surefoot.launch.logs import generation_logs
from surefoot.launch.process import STACKS_SIGNAL, catches, process_state, waits_in
from surefoot.launch.testimony import gather_witnesses, main_stack
from surefoot.launch.wire import Started

BUSY = """
import faulthandler, json, sys, threading, time
from pathlib import Path
from surefoot.coordinate.beats import BeatBoard
folder, fd, testifies = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "testifies"
faulthandler.register({signal}, file=open(folder / "rank_0.stacks", "ab"), all_threads=True)
board, path = BeatBoard.attach(fd), folder / "rank_0.testimony.json"
state = {{"name": "g", "last_enqueued": 4, "last_completed": 3, "operation": "gloo:all_reduce", "shapes": [[2]], "dtypes": ["Float"],
          "is_p2p": False}}
def say(call):
    new = path.with_suffix(".new")
    new.write_text(json.dumps({{"call": call, "groups": [state]}}))
    new.rename(path)
def answer():
    while True:
        time.sleep(0.02)
        say(board.testimony_call)
if testifies:
    say(0)
    threading.Thread(target=answer, daemon=True).start()
def spin():
    print("ready", flush=True)
    while True:
        pass
spin()
"""

Make = Callable[..., tuple[Crew, Path, int]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[tuple[Crew, subprocess.Popen[bytes]]] = []

    def start(code: str = BUSY, *, kind: str = "testifies") -> tuple[Crew, Path, int]:
        folder = generation_logs(tmp_path, 1)
        folder.mkdir(parents=True)
        board = BeatBoard.create(1, generation=1)
        life_fd, theirs = os.pipe2(os.O_CLOEXEC)
        command = [sys.executable, "-c", code.format(signal=int(STACKS_SIGNAL)), str(folder), str(board.fd), kind]
        process = subprocess.Popen(command, pass_fds=(board.fd, theirs), stdout=subprocess.PIPE, process_group=0)
        os.close(theirs)
        crew = Crew(board, life_fd=life_fd, clock=SystemClock())
        crew.adopt(Started(1, (process.pid,)), [os.pidfd_open(process.pid)])
        made.append((crew, process))
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 20.0)[0]
        return crew, tmp_path, process.pid

    yield start
    for crew, process in made:
        crew.close()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_busy_rank_says_where_it_is_and_what_it_has_enqueued(make: Make) -> None:
    crew, run_dir, pid = make()
    (witness,) = gather_witnesses(crew, run_dir, limit_s=10.0, clock=SystemClock())
    assert (witness.rank, witness.pid, witness.exit_code) == (0, pid, None)
    assert witness.stack[0].endswith("in spin")
    assert witness.groups is not None
    (group,) = witness.groups
    assert (group.name, group.last_enqueued, group.last_completed, group.shapes) == ("g", 4, 3, ((2,),))
    assert witness.details["has_answered"] is True
    assert process_state(pid) == "R"  # it was asked, and not harmed


def test_it_answers_every_call_anew(make: Make) -> None:
    crew, run_dir, _ = make()
    for call in (1, 2):
        (witness,) = gather_witnesses(crew, run_dir, limit_s=10.0, clock=SystemClock())
        assert witness.groups is not None
        assert crew.board.testimony_call == call
        assert len([frame for frame in witness.stack if frame.endswith("in spin")]) == 1


def test_a_stopped_rank_is_not_waited_for(make: Make) -> None:
    crew, run_dir, pid = make()
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + 10.0
    while process_state(pid) != "T":
        assert time.monotonic() < until_s
    begun_s = time.monotonic()
    (witness,) = gather_witnesses(crew, run_dir, limit_s=20.0, clock=SystemClock())
    assert time.monotonic() - begun_s < 10.0
    assert (witness.process_state, witness.groups, witness.stack) == ("T", None, ())


def test_who_has_not_registered_the_signal_does_not_get_it(make: Make) -> None:
    crew, run_dir, pid = make("import time; print('ready', flush=True); time.sleep(60)")
    assert not catches(pid, STACKS_SIGNAL)
    (witness,) = gather_witnesses(crew, run_dir, limit_s=10.0, clock=SystemClock())
    assert (witness.groups, witness.stack, witness.details["testifies"]) == (None, (), False)
    assert crew.alive() == [0]


def test_one_that_never_answers_is_told_when_the_time_is_over(make: Make) -> None:
    crew, run_dir, _ = make(kind="mute")
    (generation_logs(run_dir, 1) / "rank_0.testimony.json").write_text('{"call": 0, "groups": []}')
    (witness,) = gather_witnesses(crew, run_dir, limit_s=0.3, clock=SystemClock())
    assert witness.groups is None
    assert (witness.details["testifies"], witness.details["has_answered"]) == (True, False)


def test_a_process_that_is_gone_has_no_state() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert (process_state(process.pid), catches(process.pid, STACKS_SIGNAL), waits_in(process.pid)) == ("", False, "")


def test_the_main_thread_is_the_one_written_last() -> None:
    text = (
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in poll\n\n'
        'Current thread 0x02 (most recent call first):\n  File "b.py", line 2 in spin\n  File "b.py", line 9 in <module>\n'
    )
    assert main_stack(text) == ("b.py:2 in spin", "b.py:9 in <module>")
    assert main_stack("") == ()
