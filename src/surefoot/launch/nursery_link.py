"""The agent's side of a nursery: start it, ask it for ranks, hear how they ended, end it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from surefoot.core.errors import SurefootError
from surefoot.launch.wait_policy import sees_gpu, wait_policy
from surefoot.launch.wire import Message, Start, control_pair, receive_message, send_message

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_HANG_UP_LIMIT_S = 2.0  # an interpreter with torch loaded takes some tenths of a second to end
_LOOK_INTERVAL_S = 0.2


class NurseryLink:
    """One running nursery. Make it from the thread that lives as long as the process: the kernel ends a nursery with its starter."""

    def __init__(self, process: subprocess.Popen[bytes], *, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._hung_up = False

    @classmethod
    def spawn(cls, *, entry: str, warm: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> NurseryLink:
        """Exec a nursery that imports `warm` and will run `entry` ("pkg.mod:function") in each rank. Returns before it is ready.

        Its own output (import warnings, a traceback) is appended to `log_path`; `env` is added to this process's environment.
        """
        ours, theirs = control_pair()
        command = [sys.executable, "-m", "surefoot.launch.nursery", "--control-fd", str(theirs.fileno())]
        command += ["--agent-pid", str(os.getpid()), "--warm", ",".join(warm), "--entry", entry]
        environ = {**os.environ, **(env or {})}
        with theirs, log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**environ, **wait_policy(environ, has_gpu=sees_gpu(environ)), **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        return cls(process, channel=ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """The control socket, for a selector: readable when `receive` has something to say."""
        return self._channel.fileno()

    def start_ranks(self, request: Start, *, fds: Sequence[int]) -> None:
        """Ask for ranks; a Started message answers. `fds` are copied, the caller closes its own. Raises OSError when it is gone."""
        send_message(self._channel, request, fds=fds)

    def receive(self) -> tuple[Message | None, list[int]]:
        """Wait for the next message, with its pidfds, which the caller owns; (None, []) when the nursery is gone."""
        message, fds = receive_message(self._channel)
        self._hung_up = message is None
        return message, fds

    def close(self, *, limit_s: float, look: Callable[[], object]) -> int | None:
        """Kill the nursery; the kernel kills what it forked. Returns its own exit code, negative for a signal; None when it is ours.

        One that hung up by itself is on its way out and gets a moment to finish, so that its own exit code is seen. While this waits it
        calls `look` a few times per second. Raises SurefootError when the nursery is there `limit_s` after its SIGKILL.
        """
        self._channel.close()
        if self._hung_up:
            self._wait(_HANG_UP_LIMIT_S, look)
        if self._process.poll() is not None:
            return self._process.returncode
        self._process.kill()
        if not self._wait(limit_s, look):
            raise SurefootError(
                f"the nursery did not die within {limit_s:g} s of SIGKILL",
                where=f"pid {self.pid}",
                hint="it hangs in the kernel (a disk or a device): see dmesg; start again when it is gone",
                limit=limit_s,
            )
        return None

    def _wait(self, limit_s: float, look: Callable[[], object]) -> bool:
        """Whether it has ended within the limit."""
        until_s = time.monotonic() + limit_s
        while (left_s := until_s - time.monotonic()) > 0.0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(min(left_s, _LOOK_INTERVAL_S))
                return True
            look()
        return False
