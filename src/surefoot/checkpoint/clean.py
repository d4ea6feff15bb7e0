"""Processes that know nothing of this one: a job in, JSON out, bounded. No torch here.

They never see an accelerator, use one thread each and loopback alone, inherit the scheduling class, and end with their parent: this
module is what they start as (`python -m surefoot.checkpoint.clean PARENT_PID -m MODULE JOB`), and that is the first thing it sees to.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.durable import write_atomic
from surefoot.core.errors import SurefootError
from surefoot.core.parent import signal_on_parents_end
from surefoot.core.strict_json import dumps

_POLL_S = 0.05
_RESULT_NAME = "result.json"
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONSTARTUP")


def run_clean(module: str, job: Mapping[str, Any], *, size: int = 1, limit_s: float, clock: Clock | None = None) -> Any:
    """Local. `module` as the program of `size` fresh processes; what rank 0 of them left as its result.

    Each is given `job` with its `rank`, `world_size`, `limit_s` and a common `folder`. Raises SurefootError when one of them dies, or all
    are not done within `limit_s`: then nothing is known.
    """
    clock = clock or SystemClock()
    with tempfile.TemporaryDirectory(prefix="surefoot-clean-") as name:
        folder = Path(name)
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                own = {**job, "rank": rank, "world_size": size, "folder": name, "limit_s": limit_s}
                file = folder / f"job_{rank}.json"  # an argument has room for 128 KiB, and everybody can read it
                file.write_text(dumps(own))
                children.append(_start(module, file, log=folder / f"rank_{rank}.log"))
            _wait(children, folder=folder, limit_s=limit_s, clock=clock)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return json.loads((folder / _RESULT_NAME).read_text())


def begin_clean() -> dict[str, Any]:
    """In the fresh process: its job."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return job


def leave_result(job: Mapping[str, Any], result: object) -> None:
    """In rank 0 of the fresh processes."""
    write_atomic(Path(job["folder"]) / _RESULT_NAME, dumps(result), durable=False)


def end_clean() -> NoReturn:
    """In every fresh process, last: torch 2.13 may deadlock while it takes a gloo group apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def clean_environment() -> dict[str, str]:
    """What such a process may know."""
    foreign = ("SUREFOOT_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED and not name.startswith(foreign)}
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def _start(module: str, job: Path, *, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        command = [sys.executable, "-m", "surefoot.checkpoint.clean", str(os.getpid()), "-m", module, str(job)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=clean_environment())


def _wait(children: list[subprocess.Popen[bytes]], *, folder: Path, limit_s: float, clock: Clock) -> None:
    give_up_s = clock.monotonic_s() + limit_s
    while any(child.poll() is None for child in children):
        if any(child.poll() not in (None, 0) for child in children):
            break
        if clock.monotonic_s() >= give_up_s:
            hint = "nothing is known about the checkpoint; try again when the machine is quieter"
            raise SurefootError(f"a load by {len(children)} clean processes was not done within {limit_s:g} s", where="proof", hint=hint)
        clock.sleep(_POLL_S)
    for rank, child in enumerate(children):
        code = child.poll()
        if code:
            raise _died(f"clean process {rank} of {len(children)} {_ending(code)}", log=folder / f"rank_{rank}.log")


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _died(what: str, *, log: Path) -> SurefootError:
    lines = log.read_text(errors="replace").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    return SurefootError(f"{what}{last}", where="proof", hint="nothing is known about the checkpoint; is there enough memory?")


def _main() -> None:
    """The module may import torch, which takes seconds: whoever dies meanwhile is followed all the same."""
    parent_pid, _, module, *rest = sys.argv[1:]
    signal_on_parents_end(int(parent_pid), signal.SIGKILL)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
