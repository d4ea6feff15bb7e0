"""An aide and its two ends of the line: how it is started, heard, ended, and how often it is started again."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.core.sections import LaunchSection
from surefoot.launch.aide import LONG_LIFE_S, AideLink, Lives, next_life
from surefoot.launch.slots import SlotMemory
from surefoot.launch.wire import Drain

LIMITS = LaunchSection(max_restarts=3, restart_wait_s=2.0)
PROGRAM = """
import os, sys, time
from surefoot.launch.aide_duty import Duty
duty = Duty.begin(sys.argv[1:], prog="program")
print("ready", duty.run_dir, duty.generation, flush=True)
while not duty.is_over:
    request = duty.wait(60.0)
    if request is not None:
        before = duty.generation
        duty.drained(request, failures=[f"at {before}"])
        print("now at", duty.generation, flush=True)
print("over", flush=True)
"""


@pytest.mark.parametrize(("num_short", "wait_s"), [(0, 0.0), (1, 2.0), (2, 4.0), (3, None)])
def test_waits_double_and_end(num_short: int, wait_s: float | None) -> None:
    assert next_life(Lives(num_short), lived_s=1.0, limits=LIMITS) == (wait_s, Lives(num_short + 1))


def test_a_long_life_begins_the_count_anew() -> None:
    assert next_life(Lives(3), lived_s=LONG_LIFE_S, limits=LIMITS) == (0.0, Lives(1))


def test_waits_are_bounded() -> None:
    wait_s, _ = next_life(Lives(40), lived_s=1.0, limits=LaunchSection(max_restarts=100, restart_wait_s=300.0))
    assert wait_s == 300.0


def test_no_restart_is_allowed() -> None:
    assert next_life(Lives(), lived_s=1.0, limits=LaunchSection(max_restarts=0)) == (None, Lives(1))


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., AideLink]]:
    """spawn(program, slots=None): an aide that was just started; its output is in `aide.log`."""
    spawned: list[AideLink] = []

    def start(program: str, *, slots: SlotMemory | None = None) -> AideLink:
        argv = [sys.executable, "-c", program, "--run-dir", str(tmp_path)]
        spawned.append(AideLink.spawn(argv, generation=7, log_path=tmp_path / "logs" / "aide.log", slots=slots))
        return spawned[-1]

    yield start
    for link in spawned:
        link.kill()
        ended(link)


def ended(link: AideLink, *, limit_s: float = 30.0) -> int:
    give_up_s = time.monotonic() + limit_s
    while (code := link.end()) is None:
        assert time.monotonic() < give_up_s, "it does not end"
        time.sleep(0.01)
    return code


def log_of(folder: Path) -> list[str]:
    path = folder / "logs" / "aide.log"
    return path.read_text().splitlines() if path.exists() else []


def until(look: Callable[[], object], *, limit_s: float = 30.0) -> None:
    give_up_s = time.monotonic() + limit_s
    while not look():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_it_drains_and_goes_when_the_agent_hangs_up(spawn: Callable[..., AideLink], tmp_path: Path) -> None:
    link = spawn(PROGRAM)
    link.ask_to_drain(Drain(number=5, generation=8, limit_s=1.0))
    assert link.hear(wait_s=30.0) is not None
    link.hang_up()
    assert ended(link) == 0
    assert log_of(tmp_path) == [f"ready {tmp_path} 7", "now at 8", "over"]


def test_the_answer_is_to_the_question(spawn: Callable[..., AideLink]) -> None:
    link = spawn(PROGRAM)
    for number, generation in ((5, 8), (6, 9)):
        link.ask_to_drain(Drain(number=number, generation=generation, limit_s=1.0))
        answer = link.hear(wait_s=30.0)
        assert answer is not None
        assert (answer.number, answer.failures) == (number, (f"at {generation - 1}",))
    assert link.hear(wait_s=0.0) is None


def test_one_that_is_gone_says_nothing_and_its_code_is_seen(spawn: Callable[..., AideLink]) -> None:
    link = spawn("import sys; sys.exit(3)")
    assert ended(link) == 3
    assert link.end() == 3
    link.ask_to_drain(Drain(number=1, generation=1, limit_s=1.0))


def test_a_signal_is_a_negative_code(spawn: Callable[..., AideLink]) -> None:
    link = spawn(PROGRAM)
    link.kill()
    assert ended(link) == -signal.SIGKILL


def test_it_is_not_reached_by_what_is_meant_for_the_job(spawn: Callable[..., AideLink], tmp_path: Path) -> None:
    link = spawn(PROGRAM)
    until(lambda: log_of(tmp_path))
    assert os.getpgid(link.pid) == link.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(link.pid, number)
    link.hang_up()
    assert ended(link) == 0


def test_it_gets_the_slots_and_nothing_else(spawn: Callable[..., AideLink], tmp_path: Path) -> None:
    program = """
import json, os
slots = json.loads(os.environ["SUREFOOT_SLOTS"])
for rank, number, name in slots:
    os.write(int(os.environ[name]), b"%d%d" % (rank, number))
print(len(os.listdir("/proc/self/fd")))
"""
    slots = SlotMemory.create(num_ranks=2, num_slots=1)
    try:
        assert ended(spawn(program, slots=slots)) == 0
        assert [os.pread(fd, 10, 0) for fd in slots.fds] == [b"00", b"10"]
        assert log_of(tmp_path) == ["7"]  # std streams, control channel, two slots, and the listing itself
    finally:
        slots.close()


def test_what_it_started_ends_with_it(spawn: Callable[..., AideLink], tmp_path: Path) -> None:
    program = """
import os, time
pid = os.fork()
if pid:
    print(pid, flush=True)
else:
    time.sleep(1000)
"""
    link = spawn(program)
    until(lambda: log_of(tmp_path))
    pidfd = os.pidfd_open(int(log_of(tmp_path)[0]))
    assert ended(link) == 0
    until(lambda: is_gone(pidfd))
    os.close(pidfd)


def is_gone(pidfd: int) -> bool:
    """By the kernel's word: a pidfd is readable once its process has ended, reaped or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
