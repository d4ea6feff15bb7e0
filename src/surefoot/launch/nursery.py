"""The warm parent of all ranks: imports torch once, then forks ranks whenever the agent asks. `python -m surefoot.launch.nursery`.

A fork is safe only while the process has one thread, so that is checked before each fork: the agent starts the nursery with
OPENBLAS/OMP/MKL_NUM_THREADS=1, and it runs no tensor op. Being the parent, it is the one that learns how a rank ended, and says so at once.
It ends with the agent (the kernel's word), and its ranks end with it.

A rank's children (data workers) are in the rank's process group. When the agent is gone the nursery kills these groups; when the nursery
is gone the agent does. If both are killed at the same moment, ranks still die by the kernel's hand, but their children may stay behind:
nobody is left who knows them, and Linux has no death signal for a grandchild.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import TextIOWrapper

from surefoot.core.parent import signal_on_parents_end
from surefoot.launch.process import LEAVE_SIGNALS, STACKS_SIGNAL, thread_names
from surefoot.launch.wire import Message, RankExit, RankSpec, Ready, Start, Started, receive_message, send_message


@dataclass(frozen=True, slots=True)
class _Child:
    generation: int
    rank: int
    pid: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the agent until it is gone. Returns the exit code; a warm module that cannot be imported is a traceback and exit 1."""
    parser = argparse.ArgumentParser(prog="surefoot.launch.nursery")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--warm", default="", help="modules to import, comma-separated")
    parser.add_argument("--entry", required=True, help="pkg.mod:function that a rank runs")
    options = parser.parse_args(arguments)
    signal_on_parents_end(options.agent_pid, signal.SIGKILL)
    for number in LEAVE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=options.control_fd)
    control.set_inheritable(False)
    begun_s = time.monotonic()
    for name in filter(None, options.warm.split(",")):
        importlib.import_module(name)
    _require_one_thread()
    gc.collect()
    gc.freeze()  # what is warm now is never collected, so its pages stay shared with the ranks
    # From here on it sees the end of the agent by itself and has something to tidy up: woken if it is stopped, but not killed.
    signal_on_parents_end(options.agent_pid, signal.SIGCONT)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the agent is gone
        send_message(control, Ready(pid=os.getpid(), import_s=time.monotonic() - begun_s))
        _serve(control, options.entry)
    return 0


def _serve(control: socket.socket, entry: str) -> None:
    """One poll over the agent's socket and a pidfd per rank; when the agent is gone, so are the ranks and what they started."""
    children: dict[int, _Child] = {}
    poller = select.poll()
    poller.register(control, select.POLLIN)
    try:
        while True:
            for fd, _ in poller.poll():
                if fd in children:
                    poller.unregister(fd)
                    _report_exit(control, children.pop(fd))
                    os.close(fd)
                    continue
                message, fds = receive_message(control)
                if message is None:
                    return
                for pidfd in _start(message, fds, entry, children, control):
                    poller.register(pidfd, select.POLLIN)
    finally:
        for child in children.values():
            _kill_group(child)


def _start(message: Message, fds: list[int], entry: str, children: dict[int, _Child], control: socket.socket) -> list[int]:
    """Fork the ranks of a generation and say so; their pidfds."""
    if not isinstance(message, Start):
        raise ValueError(f"the nursery was sent {message}")
    pidfds = _fork_ranks(message, fds, entry, children, control)
    for fd in fds:
        os.close(fd)  # only ranks hold them now: the port and the beats end with their generation, the slots are the agent's
    send_message(control, Started(generation=message.generation, pids=tuple(children[fd].pid for fd in pidfds)), fds=pidfds)
    return pidfds


def _fork_ranks(start: Start, fds: list[int], entry: str, children: dict[int, _Child], control: socket.socket) -> list[int]:
    pidfds = []
    for spec in start.ranks:
        _require_one_thread()
        nursery_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            whole = replace(spec, env={**start.env, **spec.env}, fds={**start.fds, **spec.fds})
            _run_rank(whole, fds, entry, nursery_pid, [control.fileno(), *children])
        os.setpgid(pid, pid)  # by both sides, so the group exists whoever runs first
        pidfd = os.pidfd_open(pid)
        children[pidfd] = _Child(generation=start.generation, rank=spec.rank, pid=pid)
        pidfds.append(pidfd)
    return pidfds


def _report_exit(control: socket.socket, child: _Child) -> None:
    """Reap one rank and tell. Its process group is killed first."""
    _kill_group(child)
    _, status = os.waitpid(child.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    report = RankExit(
        generation=child.generation,
        rank=child.rank,
        pid=child.pid,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        mono_s=time.monotonic(),
    )
    try:
        send_message(control, report)
    except OSError:
        return  # the agent is gone; the next read of the socket says so and ends the rest


def _kill_group(child: _Child) -> None:
    """A rank that is not reaped yet and what it started: until then its number cannot mean another group."""
    with contextlib.suppress(ProcessLookupError):  # it has put itself into another group, and nothing is left in its own
        os.killpg(child.pid, signal.SIGKILL)


def _require_one_thread() -> None:
    names = thread_names()
    if len(names) != 1:
        raise RuntimeError(f"the nursery has {len(names)} threads ({', '.join(sorted(names))}): a fork would copy locks that nobody holds")


# --- From here on: inside a rank ---


def _run_rank(spec: RankSpec, fds: list[int], entry: str, nursery_pid: int, foreign_fds: list[int]) -> None:
    """The life of a forked rank. Never returns: whatever entry() does becomes an exit code."""
    code = 1
    try:
        signal_on_parents_end(nursery_pid, signal.SIGKILL)
        os.setpgid(0, 0)
        _own_descriptors(spec, fds, foreign_fds)
        os.environ.update(spec.env)
        code = _call(_resolve(entry))
    except BaseException:  # the boundary of the process: CheckpointException and friends are no Exceptions
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                continue  # a full disk under the log must not change what the rank says about the run
        os._exit(code)


def _own_descriptors(spec: RankSpec, fds: list[int], foreign_fds: list[int]) -> None:
    for fd in foreign_fds:
        os.close(fd)
    for index, fd in enumerate(fds):
        names = [name for name, wanted in spec.fds.items() if wanted == index]
        for name in names:
            os.environ[name] = str(fd)
        if not names:
            os.close(fd)
    for path, target in ((spec.out_path, 1), (spec.err_path, 2)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(fd, target)
        os.close(fd)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a killed rank leaves its last whole line
    faulthandler.enable()
    stacks_fd = os.open(spec.err_path.removesuffix(".err") + ".stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)


def _resolve(entry: str) -> Callable[[], object]:
    module_name, _, function_name = entry.partition(":")
    function: Callable[[], object] = getattr(importlib.import_module(module_name), function_name)
    return function


def _call(function: Callable[[], object]) -> int:
    """The exit code that `sys.exit(function())` would have."""
    try:
        result = function()
    except SystemExit as leave:
        result = leave.code
    if result is None:
        return 0
    if isinstance(result, int):
        return result & 0xFF
    sys.stderr.write(f"{result}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
