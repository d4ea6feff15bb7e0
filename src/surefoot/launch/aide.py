"""An aide: a process beside the ranks that the agent execs, hears, and ends. What it does is its own affair; `argv` says which it is.

It gets one end of a control channel. When the agent hangs up it finishes what it has and leaves; the kernel kills it with the agent. It
leads a process group, so what it started ends with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.coordinate.restart import MAX_WAIT_S
from surefoot.core.sections import LaunchSection
from surefoot.launch.slots import SlotMemory
from surefoot.launch.wire import Drain, Drained, control_pair, receive_message, send_message

# Whoever lived so long did not die of what ended the one before it. Far above the longest start, and no setting: it only bounds a loop.
LONG_LIFE_S = 600.0


@dataclass(frozen=True, slots=True)
class AideSpec:
    """`argv` is completed by the agent with --control-fd, --agent-pid and --generation. Not started before it is `wanted`.

    One that `keeps_slots` is handed the slot memory, is there before the first rank, and drains the slots between generations.
    `end_limit_s` bounds what it may take after the run; one that is `only_when_finished` gets no time when the run ends in another way.
    """

    name: str
    argv: tuple[str, ...]
    end_limit_s: float
    keeps_slots: bool = False
    only_when_finished: bool = False
    wanted: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Lives:
    """How often an aide has died in a row, each time before it had lived for long."""

    num_short: int = 0


def next_life(lives: Lives, *, lived_s: float, limits: LaunchSection) -> tuple[float | None, Lives]:
    """After a death: seconds until the next start, None when that was the last. The same bound and waits as for the ranks."""
    num_short = 1 if lived_s >= LONG_LIFE_S else lives.num_short + 1
    if num_short > limits.max_restarts:
        return None, Lives(num_short)
    wait_s = min(MAX_WAIT_S, limits.restart_wait_s * 2 ** (num_short - 2)) if num_short > 1 else 0.0
    return wait_s, Lives(num_short)


class AideLink:
    """One running aide. Make it from the thread that lives as long as the process: the kernel ends an aide with its starter."""

    def __init__(self, process: subprocess.Popen[bytes], *, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel

    @classmethod
    def spawn(cls, argv: Sequence[str], *, generation: int, log_path: Path, slots: SlotMemory | None) -> AideLink:
        """Exec it. Its output is appended to `log_path`."""
        ours, theirs = control_pair()
        log_path.parent.mkdir(exist_ok=True)
        own = ["--control-fd", str(theirs.fileno()), "--agent-pid", str(os.getpid()), "--generation", str(generation)]
        try:
            with theirs, log_path.open("ab") as log:
                process = subprocess.Popen(
                    [*argv, *own],
                    env={**os.environ, **(slots.child_env() if slots else {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), *(slots.fds if slots else ())),
                    process_group=0,
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, channel=ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask_to_drain(self, request: Drain) -> None:
        """`hear` brings the answer. One that is gone is found by `end`."""
        with contextlib.suppress(OSError):
            send_message(self._channel, request)

    def hear(self, *, wait_s: float) -> Drained | None:
        """What it said, waiting at most so long; None when that is nothing, or when it is gone."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        if not poller.poll(wait_s * 1000):
            return None
        message, _ = receive_message(self._channel)
        if message is None:
            time.sleep(wait_s)  # it is gone, and soon reaped: no reason to spin
        return message if isinstance(message, Drained) else None

    def hang_up(self) -> None:
        """Have it finish what it has, and leave."""
        self._channel.close()

    def end(self) -> int | None:
        """How it ended, negative for a signal, None while it lives. What it started is killed then, and its number given back."""
        if self._process.returncode is None and not self._has_ended():
            return None
        if self._process.returncode is None:
            self._kill_group()
        self._channel.close()
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL, to what it started too. Does not wait: `end` tells. None of its code runs any more, even if it hangs in the kernel."""
        if self._process.returncode is None:
            self._kill_group()

    def _has_ended(self) -> bool:
        """Without giving its number back: until then it cannot mean another group."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
