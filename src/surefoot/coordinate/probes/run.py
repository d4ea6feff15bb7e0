"""Runs probes of this node, each in a process of its own and with a deadline. What does not answer is killed, and said to hang."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, Final

from surefoot.coordinate.probes.checks import ProbeWish
from surefoot.coordinate.probes.records import ProbeResult
from surefoot.core import strict_json
from surefoot.core.typed_json import record_from_json

QUICK: Final = ("gpu", "xid", "ports", "memory", "clock", "space")
"""Those that only look: together well below a second where nothing hangs."""
THOROUGH: Final = (*QUICK, "disk", "compute", "bandwidth")
"""Those that move data and compute as well: only on a node where nothing trains."""
_MAX_ANSWER_BYTES: Final = 1 << 20
_LOOK_S: Final = 0.05


def run_probes(
    names: Sequence[str], wish: ProbeWish, *, limit_s: float, at_once: bool = True, look: Callable[[], None] = lambda: None
) -> tuple[ProbeResult, ...]:
    """In the order of `names`. `at_once`: all run together within `limit_s`; else one after the other, `limit_s` for each.

    `look` is called about 20 times a second. No process is left when this returns, but one that hangs in the kernel, killed already.
    """
    groups = [tuple(names)] if at_once else [(name,) for name in names]
    found = {result.name: result for group in groups for result in _together(group, wish, limit_s=limit_s, look=look)}
    return tuple(found[name] for name in names)


def _together(names: Sequence[str], wish: ProbeWish, *, limit_s: float, look: Callable[[], None]) -> list[ProbeResult]:
    begin_s = time.monotonic()
    child = _start(names, wish)
    assert child.stdout is not None
    found: dict[str, ProbeResult] = {}
    try:
        for line in _lines(child.stdout, until_s=begin_s + limit_s, look=look):
            if (result := _result(line)) is not None and result.name in names:
                found[result.name] = replace(result, took_s=round(time.monotonic() - begin_s, 3))
        if len(found) < len(names):
            _missing(names, found, is_over=time.monotonic() < begin_s + limit_s, limit_s=limit_s)
    finally:
        _end(child)
    return list(found.values())


def _missing(names: Sequence[str], found: dict[str, ProbeResult], *, is_over: bool, limit_s: float) -> None:
    """Who did not answer: for lack of time, or since the process that had to start it ended."""
    for name in names:
        if name not in found and is_over:
            found[name] = ProbeResult(name, "failed", "the process that runs the probes ended without an answer")
        elif name not in found:
            found[name] = ProbeResult(name, "hung", f"no answer within {limit_s:g} s", took_s=limit_s)


def _start(names: Sequence[str], wish: ProbeWish) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "surefoot.coordinate.probes.child", strict_json.dumps(wish), str(os.getpid()), *names]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0, env=_environment(os.environ))


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what tells torch that it is a rank of a job."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in given.items() if name not in ranks}


def _lines(stream: IO[bytes], *, until_s: float, look: Callable[[], None]) -> Iterator[bytes]:
    """Whole lines as they come, until the other side has ended or the time is over."""
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    rest, num_bytes = b"", 0
    while (left_s := until_s - time.monotonic()) > 0.0 and num_bytes < _MAX_ANSWER_BYTES:
        if poller.poll(min(_LOOK_S, left_s) * 1000):
            part = os.read(stream.fileno(), 65536)
            if not part:
                return
            num_bytes += len(part)
            *lines, rest = (rest + part).split(b"\n")
            yield from lines
        look()


def _result(line: bytes) -> ProbeResult | None:
    """None for a line that somebody else wrote, as libraries do."""
    try:
        return record_from_json(ProbeResult, strict_json.loads(line))
    except ValueError:
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """With all that it started; its number is its own until it is waited for. One that hangs in the kernel keeps it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    if child.stdout is not None:
        child.stdout.close()
