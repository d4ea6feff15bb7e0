"""The kernel's word that a process ends with the one that started it. Linux; standard library only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def signal_on_parents_end(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends; exits at once when that has happened already.

    Called by the child itself: a `preexec_fn` would run Python between fork and exec. The last call counts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os._exit(1)
