"""Facts about Linux processes that the agent, the nursery and the ranks rely on. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

# What a person, a shell, a closing terminal or a scheduler sends to a whole job. The agent alone answers them; the nursery ignores them,
# and its ranks with it.
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# A rank that gets it appends the stacks of all its threads to a file, at once and in C: a busy loop or a held interpreter does not hinder
# it. Whoever did not register it would die of it, so `catches` is asked first.
STACKS_SIGNAL = signal.SIGRTMIN + 1


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The leave signals that this process is to answer: all but a SIGHUP that `nohup` had it ignore from its start."""
    deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in LEAVE_SIGNALS if not (deaf and number == signal.SIGHUP))


def run_when_idle() -> None:
    """From now on this process, and what it starts, runs only when nobody else wants the processor; last in line where that is refused."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)


def let_others_first() -> None:
    """From now on this *thread* gets the processor after everybody else, but never nothing: the 70th part of a core that another wants."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux a thread has a priority of its own


def kill_group(leader_pid: int, *, pidfd: int) -> None:
    """SIGKILL to a process that leads a group, and to the rest of its group when it is gone already.

    A number may have been given to a stranger since. But the kernel does not give it away while the group has a member: so if the leader
    is gone and a process of that number exists, the group is not the one that was meant.
    """
    with contextlib.suppress(ProcessLookupError):
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            if Path(f"/proc/{leader_pid}").exists():
                return
        os.killpg(leader_pid, signal.SIGKILL)


def thread_names() -> list[str]:
    """The kernel's names of all threads of this process, the main one included. C++ threads count: Python does not know them."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def process_state(pid: int) -> str:
    """The kernel's letter for it: R runs, S and D wait, T is stopped, t is held by a debugger; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text[text.rindex(")") + 2]


def catches(pid: int, number: int) -> bool:
    """Whether it has a handler of its own for this signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def waits_in(pid: int) -> str:
    """The kernel function in which it waits; empty where that is not told."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip("0")
    except OSError:
        return ""
