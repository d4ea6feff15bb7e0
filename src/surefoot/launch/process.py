"""Facts about Linux processes that the agent, the nursery and the ranks rely on. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1

# What a person, a shell, a closing terminal or a scheduler sends to a whole job. The agent alone answers them; the nursery ignores them,
# and its ranks with it.
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The leave signals that this process is to answer: all but a SIGHUP that `nohup` had it ignore from its start."""
    deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in LEAVE_SIGNALS if not (deaf and number == signal.SIGHUP))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends; exits at once when that has happened already.

    Called by the child itself: a `preexec_fn` would run Python between fork and exec.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os._exit(1)


def thread_names() -> list[str]:
    """The kernel's names of all threads of this process, the main one included. C++ threads count: Python does not know them."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
