from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from surefoot.coordinate.beats import BeatBoard, LeaveReason
from surefoot.core.clock import ManualClock
from surefoot.core.errors import SurefootError
from surefoot.core.records import Phase


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now_s=100.0)


@pytest.fixture
def board(clock: ManualClock) -> Iterator[BeatBoard]:
    made = BeatBoard.create(3, generation=7, clock=clock)
    yield made
    made.close()


def test_a_beat_reads_back(board: BeatBoard, clock: ManualClock) -> None:
    clock.sleep(0.5)
    board.slot(1).beat(phase=Phase.STEP, step=2**40, micro_step=3, collective_seq=2**33, restored=True)
    beat = board.read(1)
    assert (beat.rank, beat.pid, beat.generation, beat.phase) == (1, os.getpid(), 7, Phase.STEP)
    assert (beat.step, beat.micro_step, beat.collective_seq, beat.restored, beat.num_beats) == (2**40, 3, 2**33, True, 1)
    assert beat.mono_s == 100.5


def test_a_rank_that_never_beat_has_no_pid(board: BeatBoard) -> None:
    board.slot(1).beat(phase=Phase.STEP)
    assert [(beat.pid > 0, beat.num_beats) for beat in board.read_all()] == [(False, 0), (True, 1), (False, 0)]


def test_what_a_beat_does_not_name_stays(board: BeatBoard, clock: ManualClock) -> None:
    slot = board.slot(0)
    slot.beat(phase=Phase.SAVE, step=5, micro_step=2, restored=True)
    clock.sleep(1.0)
    slot.beat(micro_step=3)
    beat = board.read(0)
    assert (beat.phase, beat.step, beat.micro_step, beat.restored, beat.num_beats, beat.mono_s) == (Phase.SAVE, 5, 3, True, 2, 101.0)


def test_an_exchange_is_entered_and_left(board: BeatBoard) -> None:
    slot = board.slot(2)
    slot.beat(phase=Phase.STEP, step=3, warm=True)
    slot.enter("loop")
    inside = board.read(2)
    slot.enter("")
    outside = board.read(2)
    assert (inside.group, inside.collective_seq, inside.warm, inside.step) == ("loop", 1, True, 3)
    assert (outside.group, outside.collective_seq, outside.num_beats) == ("", 1, 3)


def test_calls_for_testimony_are_numbered(board: BeatBoard) -> None:
    other = BeatBoard.attach(os.dup(board.fd))
    assert other.testimony_call == 0
    assert [board.call_for_testimony(), board.call_for_testimony()] == [1, 2]
    assert other.testimony_call == 2
    assert not other.leave_requested
    assert other.ranks == board.ranks
    other.close()


def test_the_request_to_leave_keeps_its_first_reason(board: BeatBoard) -> None:
    assert not board.leave_requested
    board.request_leave(LeaveReason.PREEMPTED)
    board.request_leave(LeaveReason.OPERATOR)
    assert board.leave_requested is LeaveReason.PREEMPTED


def test_a_fork_shares_the_board(board: BeatBoard) -> None:
    pid = os.fork()
    if pid == 0:
        board.slot(2).beat(phase=Phase.RESTORE, step=9)
        os._exit(0)
    os.waitpid(pid, 0)
    beat = board.read(2)
    assert (beat.pid, beat.phase, beat.step) == (pid, Phase.RESTORE, 9)


def test_another_program_attaches_by_descriptor(board: BeatBoard) -> None:
    script = f"""
from surefoot.coordinate.beats import BeatBoard
from surefoot.core.records import Phase
board = BeatBoard.attach({board.fd})
board.slot(0).beat(phase=Phase.STEP, step=4)
board.request_leave()
print(len(board.ranks), board.generation)
"""
    done = subprocess.run([sys.executable, "-c", script], pass_fds=[board.fd], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "7"]
    assert board.read(0).step == 4
    assert board.leave_requested


def test_the_last_words_of_a_killed_rank_stay(board: BeatBoard) -> None:
    pid = os.fork()
    if pid == 0:
        slot, step = board.slot(0), 0
        while True:
            step += 1
            slot.beat(phase=Phase.STEP, step=step, micro_step=step, collective_seq=step)
    seen = 0
    try:
        while seen < 2000:
            beat = board.read(0)
            # Never a mixture of two beats, however fast they follow each other.
            assert beat.step == beat.micro_step == beat.collective_seq
            assert beat.step >= seen
            seen = beat.step
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert board.read(0).pid == pid
    assert board.read(0).step >= 2000


def test_a_descriptor_without_beats_is_refused() -> None:
    with pytest.raises(SurefootError, match="no beats behind this descriptor"):
        BeatBoard.attach(9999)
    for content in (b"short", b"x" * 4096):
        fd = os.memfd_create("other")
        os.write(fd, content)
        with pytest.raises(SurefootError, match="beats"):
            BeatBoard.attach(fd)
        os.close(fd)


def test_a_rank_that_is_not_on_the_board_is_refused(board: BeatBoard) -> None:
    with pytest.raises(SurefootError, match="rank 3 has no slot"):
        board.slot(3)
