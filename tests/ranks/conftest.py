"""`run_ranks(fn, world_size, timeout_s=60, **kwargs)`: run a function of a test file on real gloo ranks, in about a second.

The ranks are forked by the product's own nursery, which imports torch once per session. `fn` is a module-level function; it is called as
`fn(rank=, world_size=, **kwargs)` with the gloo group initialised (not with `init=False`), one intra-op thread, and its results come back
in the order of the ranks. A rank that raises, dies or hangs fails the test by name, and no process outlives the call.
"""

from __future__ import annotations

import inspect
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.launch.nursery_link import NurseryLink
from surefoot.launch.wire import RankExit, RankSpec, Ready, Start, Started
from tests.texts import prepare_documents

_WARM = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch.distributed.tensor",
    "numpy",
    "pytest",
)

_WARM_UP_LIMIT_S = 110.0  # 2 s on a quiet machine; imports took 21 s on a loaded one
_AFTER_FAILURE_S = 5.0  # peers of a dead rank see their sockets reset within 0.1 s


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung; the message says which, with tracebacks and the end of their output."""


class WarmParent:
    """The nursery of a test session, and one call of ranks after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_calls = 0
        tests = Path(__file__).parent
        path = filter(None, (str(tests), str(tests.parents[1]), os.environ.get("PYTHONPATH", "")))
        env = {"PYTHONPATH": os.pathsep.join(path)}
        self.log_path = folder / "nursery.log"
        self.link = NurseryLink.spawn(entry="rank_entry:main", warm=_WARM, log_path=self.log_path, env=env)
        ready, _ = self.receive(time.monotonic() + _WARM_UP_LIMIT_S)
        assert isinstance(ready, Ready), f"no warm parent: {self.log_path.read_text()}"

    def receive(self, deadline_s: float) -> tuple[Any, list[int]]:
        poller = select.poll()
        poller.register(self.link.fileno(), select.POLLIN)
        if not poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            return None, []
        message, fds = self.link.receive()
        assert message is not None, f"the warm parent died: {self.log_path.read_text()}"
        return message, fds

    def run(self, fn: Callable[..., Any], world_size: int, *, timeout_s: float, init: bool, kwargs: dict[str, Any]) -> list[Any]:
        self.num_calls += 1
        folder = self.folder / f"call{self.num_calls:04d}"
        folder.mkdir()
        path = inspect.getfile(fn)
        call = {"path": path, "module": fn.__module__, "name": fn.__qualname__, "kwargs": kwargs, "init": init, "timeout_s": timeout_s}
        (folder / "call.pkl").write_bytes(pickle.dumps(call))
        deadline_s = time.monotonic() + timeout_s
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ranks = tuple(_spec(rank, world_size, folder=folder, port=listener.getsockname()[1]) for rank in range(world_size))
            self.link.start_ranks(Start(generation=self.num_calls, ranks=ranks), fds=[listener.fileno()])
        started, pidfds = self.receive(time.monotonic() + _WARM_UP_LIMIT_S)
        assert isinstance(started, Started)
        try:
            exits, hung = self._await_exits(pidfds, deadline_s)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        return _results(exits, hung, folder=folder, timeout_s=timeout_s)

    def _await_exits(self, pidfds: list[int], deadline_s: float) -> tuple[list[RankExit], list[int]]:
        """All exits in the order in which they came, and the ranks that were killed here because the time was up.

        After a first failure the others get a few seconds to fail by themselves.
        """
        exits: list[RankExit] = []
        hung: list[int] = []
        while len(exits) < len(pidfds):
            message, _ = self.receive(deadline_s)
            if message is None:
                hung = sorted(set(range(len(pidfds))) - {ended.rank for ended in exits})
                for rank in hung:
                    signal.pidfd_send_signal(pidfds[rank], signal.SIGKILL)
                deadline_s = time.monotonic() + _WARM_UP_LIMIT_S
                continue
            exits.append(message)
            if message.exit_code != 0 and not hung:
                deadline_s = min(deadline_s, time.monotonic() + _AFTER_FAILURE_S)
        return exits, hung


def _spec(rank: int, world_size: int, *, folder: Path, port: int) -> RankSpec:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TEST_CALL": str(folder / "call.pkl"),
        "TEST_OUTCOME": str(folder / f"rank_{rank}.pkl"),
    }
    log_path = str(folder / f"rank_{rank}.log")
    return RankSpec(rank=rank, env=env, out_path=log_path, err_path=log_path, fds={"SUREFOOT_LISTEN_FD": 0} if rank == 0 else {})


def _results(exits: list[RankExit], hung: list[int], *, folder: Path, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    late: list[str] = []  # after the function returned: a consequence, unless nothing else failed
    for ended in exits:
        outcome_path = folder / f"rank_{ended.rank}.pkl"
        kind, value = pickle.loads(outcome_path.read_bytes()) if outcome_path.exists() else ("nothing", None)
        how = f"signal {ended.signal}" if ended.signal is not None else f"exit code {ended.exit_code}"
        if kind == "error":
            failures.append(f"rank {ended.rank} raised:\n{value}")
        elif ended.rank in hung:
            failures.append(f"rank {ended.rank} did not end (limit {timeout_s:g} s) and was killed\n{_tail(folder, ended.rank)}")
        elif kind == "nothing":
            failures.append(f"rank {ended.rank} died: {how}\n{_tail(folder, ended.rank)}")
        else:
            results[ended.rank] = value
            if ended.exit_code != 0:
                late.append(f"rank {ended.rank} returned and then failed: {how}\n{_tail(folder, ended.rank)}")
    if failures or late:
        raise RanksFailed("\n".join(failures or late))
    return [results[rank] for rank in sorted(results)]


def _tail(folder: Path, rank: int) -> str:
    path = folder / f"rank_{rank}.log"
    return path.read_text(errors="replace")[-4000:] if path.exists() else "(no output)"


@pytest.fixture(scope="session")
def warm_parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmParent]:
    parent = WarmParent(tmp_path_factory.mktemp("warm_parent"))
    yield parent
    parent.link.close(limit_s=30.0, look=lambda: None)


@pytest.fixture
def run_ranks(warm_parent: WarmParent) -> Callable[..., list[Any]]:
    def run(fn: Callable[..., Any], world_size: int, timeout_s: float = 60.0, *, init: bool = True, **kwargs: Any) -> list[Any]:
        return warm_parent.run(fn, world_size, timeout_s=timeout_s, init=init, kwargs=kwargs)

    return run


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_documents(tmp_path_factory.mktemp("text"))
