"""The aide's end of the line to its agent: what is asked of it, and the word that the run is over."""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from surefoot.core.parent import signal_on_parents_end
from surefoot.launch.process import LEAVE_SIGNALS
from surefoot.launch.wire import Drain, Drained, receive_message, send_message


class Duty:
    """`generation` is the one to ledger under; `is_over` once the agent hung up: finish what is there, and leave."""

    def __init__(self, control: socket.socket, *, run_dir: Path, generation: int) -> None:
        self.run_dir = run_dir
        self.generation = generation
        self.is_over = False
        self._control = control

    @classmethod
    def begin(cls, arguments: Sequence[str] | None = None, *, prog: str) -> Duty:
        """First of all in the process: from here on it ends with its agent, and what is meant for the whole job passes it by."""
        parser = argparse.ArgumentParser(prog=prog)
        parser.add_argument("--run-dir", type=Path, required=True)
        parser.add_argument("--control-fd", type=int, required=True)
        parser.add_argument("--agent-pid", type=int, required=True)
        parser.add_argument("--generation", type=int, required=True)
        options = parser.parse_args(arguments)
        signal_on_parents_end(options.agent_pid, signal.SIGKILL)
        for number in LEAVE_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        control = socket.socket(fileno=options.control_fd)
        os.set_inheritable(options.control_fd, False)
        return cls(control, run_dir=options.run_dir, generation=options.generation)

    def wait(self, limit_s: float) -> Drain | None:
        """What the agent asks, waiting at most so long for it; None when that is nothing, at once when it is over."""
        if self.is_over:
            return None
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        if not poller.poll(limit_s * 1000):
            return None
        message, _ = receive_message(self._control)
        if message is None:
            self.is_over = True
            return None
        if not isinstance(message, Drain):
            raise ValueError(f"an aide was sent {message}")
        return message

    def drained(self, request: Drain, *, failures: Sequence[str]) -> None:
        """Answer: nothing of older generations is under way any more, and what follows belongs to the one asked for."""
        self.generation = request.generation
        try:
            send_message(self._control, Drained(request.number, tuple(failures)))
        except OSError:
            self.is_over = True
