"""Probes, each in a process of its own: `python -m surefoot.coordinate.probes.child WISH PARENT_PID NAME...`. One line of JSON for each."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from surefoot.coordinate.probes import checks
from surefoot.coordinate.probes.checks import ProbeWish
from surefoot.coordinate.probes.records import ProbeResult
from surefoot.core import strict_json
from surefoot.core.parent import signal_on_parents_end
from surefoot.core.typed_json import record_from_json


def _compute(wish: ProbeWish) -> ProbeResult:
    from surefoot.coordinate.probes.compute import probe_compute

    return probe_compute(wish)


def _bandwidth(wish: ProbeWish) -> ProbeResult:
    from surefoot.coordinate.probes.compute import probe_bandwidth

    return probe_bandwidth(wish)


PROBES: Final[Mapping[str, Callable[[ProbeWish], ProbeResult]]] = {
    "gpu": checks.probe_gpus,
    "xid": checks.probe_xids,
    "ports": checks.probe_ports,
    "memory": checks.probe_memory,
    "clock": checks.probe_clock,
    "space": checks.probe_space,
    "disk": checks.probe_disk,
    "compute": _compute,
    "bandwidth": _bandwidth,
}

_ANSWERED: Final = 77  # no code that a crash ends with


def main(arguments: Sequence[str] | None = None) -> int:
    wish_text, parent_pid, *names = arguments or sys.argv[1:]
    signal_on_parents_end(int(parent_pid), signal.SIGKILL)
    wish = record_from_json(ProbeWish, strict_json.loads(wish_text))
    names_by_pid = {_forked(name, wish): name for name in names}
    while names_by_pid:
        pid, status = os.wait()
        name, code = names_by_pid.pop(pid), os.waitstatus_to_exitcode(status)
        if code != _ANSWERED:
            words = f"the probe was killed by signal {-code}" if code < 0 else f"the probe ended with {code} and no answer"
            _answer(ProbeResult(name, "failed", words))
    return 0


def _forked(name: str, wish: ProbeWish) -> int:
    """Each probe has a process, and all have the modules that were imported here: six interpreters would take a second to start."""
    leader = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal_on_parents_end(leader, signal.SIGKILL)
        _answer(PROBES[name](wish))
        code = _ANSWERED
    except BaseException as error:  # the border of this process: what a probe meets is its result
        _answer(ProbeResult(name, "failed", f"the probe raised {type(error).__name__}: {error}"[:300]))
        code = _ANSWERED
    finally:
        os._exit(code)


def _answer(result: ProbeResult) -> None:
    """In one write of less than a pipe takes whole, so that lines of several processes do not mix."""
    line = strict_json.dumps(result).encode()
    if len(line) >= select.PIPE_BUF:
        line = strict_json.dumps(replace(result, figures={}, reason=result.reason[:500])).encode()
    os.write(sys.stdout.fileno(), line + b"\n")


if __name__ == "__main__":
    sys.exit(main())
