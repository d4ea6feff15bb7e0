"""Wishes from outside this process: signals that it gets itself, and the agent's request on the beats board."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class LeaveRequests:
    """Remembers that somebody asked this rank to leave. The group agrees on it in the next exchange; one rank never leaves alone.

    SIGINT and SIGHUP count where no agent stands between the terminal and this process. Handlers are installed from the main thread only;
    elsewhere signals stay as they are and only the board speaks.
    """

    def __init__(self, *, asked_by_agent: Callable[[], bool], takes_interrupts: bool) -> None:
        self._asked_by_agent = asked_by_agent
        self._received: str | None = None
        self._replaced: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _heeded(alone=takes_interrupts):
                self._replaced[number] = signal.signal(number, self._remember)

    @property
    def reason(self) -> str | None:
        """Why this rank should leave, or None."""
        return self._received or ("asked by the agent" if self._asked_by_agent() else None)

    def close(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def _remember(self, number: int, _: FrameType | None) -> None:
        self._received = f"received {signal.Signals(number).name}"


def _heeded(*, alone: bool) -> tuple[signal.Signals, ...]:
    """Without an agent the terminal's signals come here too; a SIGHUP that `nohup` made this process ignore stays ignored."""
    if not alone:
        return LEAVE_SIGNALS
    deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (*LEAVE_SIGNALS, signal.SIGINT, *(() if deaf else (signal.SIGHUP,)))
