"""Messages arrive as they were sent, with their descriptors; limits are errors, a closed channel is none."""

from __future__ import annotations

import os

import pytest

from surefoot.launch.wire import (
    Drain,
    Drained,
    Message,
    RankExit,
    RankSpec,
    Ready,
    Start,
    Started,
    control_pair,
    receive_message,
    send_message,
)

SPEC = RankSpec(rank=0, env={"RANK": "0"}, out_path="/o", err_path="/e", fds={"SUREFOOT_LISTEN_FD": 0})


@pytest.mark.parametrize(
    "message",
    [
        Start(generation=3, ranks=(SPEC,)),
        Start(generation=3, ranks=(SPEC,), env={"SUREFOOT_SLOTS": "[]"}, fds={"SUREFOOT_SLOT_0_0": 3}),
        Ready(pid=1, import_s=0.5),
        Started(generation=3, pids=(5, 6)),
        RankExit(generation=3, rank=1, pid=6, exit_code=None, signal=9, mono_s=12.5),
        Drain(number=2, generation=4, limit_s=600.0),
        Drained(number=2, failures=("slot 0 of rank 1 was still being filled",)),
    ],
)
def test_round_trip(message: Message) -> None:
    ours, theirs = control_pair()
    with ours, theirs:
        send_message(ours, message)
        assert receive_message(theirs) == (message, [])


def test_descriptors_travel_along_and_do_not_leak_into_children() -> None:
    ours, theirs = control_pair()
    read_fd, write_fd = os.pipe()
    with ours, theirs:
        send_message(ours, Ready(pid=1, import_s=0.0), fds=[write_fd])
        _, fds = receive_message(theirs)
        assert not os.get_inheritable(fds[0])
        os.write(fds[0], b"x")
        assert os.read(read_fd, 1) == b"x"
    for fd in (read_fd, write_fd, *fds):
        os.close(fd)


def test_a_closed_channel_is_the_end() -> None:
    ours, theirs = control_pair()
    with theirs:
        ours.close()
        assert receive_message(theirs) == (None, [])


def test_messages_before_the_end_are_not_lost() -> None:
    ours, theirs = control_pair()
    with theirs:
        send_message(ours, Ready(pid=1, import_s=0.0))
        ours.close()
        assert receive_message(theirs)[0] == Ready(pid=1, import_s=0.0)
        assert receive_message(theirs) == (None, [])


def test_what_does_not_fit_a_packet_is_refused() -> None:
    ours, theirs = control_pair()
    with ours, theirs, pytest.raises(ValueError, match="limits are"):
        send_message(ours, Start(generation=1, ranks=(RankSpec(0, {"X": "x" * 200_000}, "/o", "/e"),)))
