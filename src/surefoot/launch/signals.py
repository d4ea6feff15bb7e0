"""Requests to leave, as they reach the agent: SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, in whatever phase it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from surefoot.launch.process import LEAVE_SIGNALS, heeded_signals

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class LeaveSignals:
    """While entered, the leave signals wake a selector and do nothing else: no code runs between two arbitrary lines of the agent.

    Enter it in the main thread. The kernel's number arrives through a pipe (`signal.set_wakeup_fd`), so none is lost between a check and
    the wait after it.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = -1, -1
        self._previous: dict[int, _Handler] = {}
        self._previous_wakeup_fd = -1

    def __enter__(self) -> LeaveSignals:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in heeded_signals():
            self._previous[number] = signal.signal(number, _only_wake)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._read_fd

    def take(self) -> list[signal.Signals]:
        """The leave signals since the last call, in order; never waits."""
        try:
            numbers = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in LEAVE_SIGNALS]


def _only_wake(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has the number; a handler must exist so that the default action does not happen."""
