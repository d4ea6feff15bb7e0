"""The nursery: one thread when warm, ranks that start clean, exits reported as they were."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.errors import SurefootError
from surefoot.launch.nursery_link import NurseryLink
from surefoot.launch.process import LEAVE_SIGNALS
from surefoot.launch.wire import Ready, control_pair

Nursery = Any
OpenNursery = Callable[..., Any]

TORCH = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch._dynamo",
)


def test_it_has_one_thread_with_torch_warm_and_no_pyarrow(open_nursery: OpenNursery) -> None:
    nursery = open_nursery(*TORCH)
    ready = nursery.hear()
    assert isinstance(ready, Ready), nursery.log_path.read_text()
    assert ready.import_s > 0.0
    assert len(os.listdir(f"/proc/{ready.pid}/task")) == 1
    assert "arrow" not in Path(f"/proc/{ready.pid}/maps").read_text()


def test_a_warm_module_that_starts_a_thread_is_refused(open_nursery: OpenNursery) -> None:
    nursery = open_nursery("threaded")
    assert nursery.hear() is None
    assert nursery.close() == 1
    assert "the nursery has 2 threads" in nursery.log_path.read_text()


def test_a_warm_module_that_cannot_be_imported(open_nursery: OpenNursery) -> None:
    nursery = open_nursery("no_such_module")
    assert nursery.hear() is None
    assert nursery.close() == 1
    assert "No module named 'no_such_module'" in nursery.log_path.read_text()


@pytest.mark.parametrize(
    ("kind", "exit_code", "number", "words"),
    [
        ("done", 0, None, ""),
        ("exit", 5, None, ""),
        ("exit-text", 1, None, "no data"),
        ("raise", 1, None, "RuntimeError: broken"),
        ("base-exception", 1, None, "KeyboardInterrupt"),
        ("signal", None, signal.SIGKILL, ""),
    ],
)
def test_exits_are_reported_as_they_were(nursery: Nursery, kind: str, exit_code: int | None, number: int | None, words: str) -> None:
    started = nursery.start(kind)
    ended = nursery.exits(1)[0]
    assert (ended.generation, ended.rank, ended.pid) == (7, 0, started.pids[0])
    assert (ended.exit_code, ended.signal) == (exit_code, number)
    assert nursery.out(0).read_text() == "out\n"
    assert nursery.err(0).read_text().startswith("err\n")
    assert words in nursery.err(0).read_text()


def test_a_rank_starts_clean(nursery: Nursery) -> None:
    """Own process group, the descriptors named for it, one of its own and no others."""
    with socket.create_server(("127.0.0.1", 0)) as listener, open("/dev/null") as beats:
        names = {0: {"SUREFOOT_LISTEN_FD": 0, "SUREFOOT_BEATS_FD": 1}, 1: {"SUREFOOT_BEATS_FD": 1}}
        started = nursery.start("facts", "facts", fds=(listener.fileno(), beats.fileno()), names=names)
    nursery.exits(2)
    for rank in (0, 1):
        facts = json.loads(nursery.out(rank).read_text().splitlines()[1])
        assert facts["pid"] == facts["group"] == started.pids[rank]
        wanted = {0, 1, 2, int(facts["beats_fd"])} | ({int(facts["listen_fd"])} if rank == 0 else set())
        assert len(set(facts["fds"]) - wanted) == 1  # its stacks go there when it is asked for them
        assert wanted < set(facts["fds"])
        assert nursery.out(rank).with_suffix(".stacks").read_text() == ""
        assert (facts["listen_fd"] is None) == (rank == 1)


def test_the_port_is_free_once_the_ranks_are_gone(nursery: Nursery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        nursery.start("done", fds=(listener.fileno(),), names={0: {"SUREFOOT_LISTEN_FD": 0}})
    nursery.exits(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


def test_what_a_rank_left_running_ends_with_it(nursery: Nursery) -> None:
    nursery.start("child")
    nursery.exits(1)
    assert ends(int(nursery.out(0).read_text().split()[-1]))


def test_it_serves_one_generation_after_the_other(nursery: Nursery) -> None:
    for _ in range(3):
        nursery.start("done", "exit")
        assert {rank: ended.exit_code for rank, ended in nursery.exits(2).items()} == {0: 0, 1: 5}


def test_it_ignores_what_is_meant_for_the_job(nursery: Nursery) -> None:
    for number in LEAVE_SIGNALS:
        os.kill(nursery.link.pid, number)
    nursery.start("done")
    assert nursery.exits(1)[0].exit_code == 0


def test_its_ranks_ignore_it_too(nursery: Nursery) -> None:
    nursery.start("facts")
    nursery.exits(1)
    facts = json.loads(nursery.out(0).read_text().splitlines()[1])
    assert set(facts["ignored"]) >= set(LEAVE_SIGNALS)


def test_ranks_end_with_the_nursery(nursery: Nursery) -> None:
    started = nursery.start("wait")
    assert nursery.close() is None  # it did not end by itself
    assert ends(started.pids[0])


def test_a_nursery_that_was_killed_is_told_from_one_that_we_end(nursery: Nursery) -> None:
    os.kill(nursery.link.pid, signal.SIGKILL)
    assert nursery.hear() is None
    assert nursery.close() == -signal.SIGKILL


class Undying(subprocess.Popen[bytes]):
    """As a process that hangs in the kernel: SIGKILL does not end it."""

    def kill(self) -> None:
        pass


def test_a_nursery_that_does_not_die_is_not_waited_for_without_end() -> None:
    ours, theirs = control_pair()
    looks = []
    with theirs, Undying(["sleep", "60"]) as process:
        link = NurseryLink(process, channel=ours)
        with pytest.raises(SurefootError, match=r"did not die within 0\.3 s") as caught:
            link.close(limit_s=0.3, look=lambda: looks.append(1))
        assert str(process.pid) in caught.value.where
        assert looks
        process.send_signal(signal.SIGKILL)


def ends(pid: int) -> bool:
    """Whether a process that is not our child ends within the limit; a zombie has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    ended = bool(poller.poll(10_000))
    os.close(pidfd)
    return ended
