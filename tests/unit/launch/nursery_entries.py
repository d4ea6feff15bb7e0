"""What ranks run in the tests of the nursery: RANK chooses."""

from __future__ import annotations

import json
import os
import signal
import sys


def main() -> object:
    print("out", flush=True)
    print("err", file=sys.stderr, flush=True)
    kind = os.environ["KIND"]
    if kind == "facts":
        fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
        facts = {
            "pid": os.getpid(),
            "group": os.getpgid(0),
            "fds": [fd for fd in fds if _exists(fd)],
            "ignored": sorted(number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN),
            "listen_fd": os.environ.get("SUREFOOT_LISTEN_FD"),
            "beats_fd": os.environ.get("SUREFOOT_BEATS_FD"),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        }
        print(json.dumps(facts))
    elif kind == "exit":
        sys.exit(5)
    elif kind == "exit-text":
        sys.exit("no data")
    elif kind == "raise":
        raise RuntimeError("broken")
    elif kind == "base-exception":
        raise KeyboardInterrupt
    elif kind == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "wait":
        signal.pause()
    elif kind == "child":
        pid = os.fork()
        if pid == 0:
            signal.pause()
        print(pid)
    return None


def _exists(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
