"""Why a process ended: its exit, its last words and what the machine counted, told apart. Pure.

A cause comes with a fingerprint where the program itself is at fault: what failed and at which line, but no message, since addresses and
sizes in it change from one time to the next. Two equal fingerprints at one step say that a third try would end there too.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from surefoot.coordinate.witness import Alarm, Witness
from surefoot.core.errors import EXIT_DONE, EXIT_RETRY


class Cause(StrEnum):
    """The kinds that are treated differently by somebody: a person, a grade, or the site."""

    STOPPED = "stopped"
    BEAT_LAPSE = "beat-lapse"
    COLLECTIVE_TIMEOUT = "collective-timeout"
    MISMATCHED_COLLECTIVE = "mismatched-collective"
    PEER_LOST = "peer-lost"
    DEVICE_OOM = "device-oom"
    HOST_OOM = "host-oom"
    SEGFAULT = "segfault"
    ABORTED = "aborted"
    XID = "xid"
    NODE_SILENT = "node-silent"
    PREEMPTION = "preemption"
    EXCEPTION = "exception"
    DELIBERATE = "deliberate"
    KILLED = "killed"
    INIT_DEADLINE = "init-deadline"
    NURSERY = "nursery"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the machine says beside the processes: how many kills for lack of memory it counted since the generation began, the processes
    that its log names for that, the accelerator errors that it logged since, and whether somebody asked the job to leave."""

    num_oom_kills: int = 0
    oom_pids: frozenset[int] = frozenset()
    xids: tuple[str, ...] = ()
    asked_to_leave: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A cause with its reason; `fingerprint` is empty where a repetition would say nothing about the program."""

    cause: Cause
    reason: str
    fingerprint: str = ""


# What a rank says about the run by its exit code: no restart changes it.
DELIBERATE_CODES = frozenset({2, 3, 4, 5, 6, 7, 93})

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$')
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::|$)")
# What torch, gloo and NCCL say when the other side of a connection is gone or did not come: the speaker is a victim.
_PEER_WORDS = re.compile(
    r"connection (closed|reset|refused)|timed out waiting|socket timeout|broken pipe|distbackenderror|distnetworkerror"
    r"|watchdog caught collective|nccl (communicator was aborted|remote error)|gloo.*(timeout|timed out|unreachable)",
    re.IGNORECASE,
)
_TIMEOUT_WORDS = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_OOM_TYPES = ("OutOfMemoryError", "CUDA out of memory", "HIP out of memory")


def cause_of(witness: Witness, *, facts: HostFacts | None = None) -> Found:
    """Why this rank's process ended; Cause.UNKNOWN while it lives. Of the machine's facts a named process weighs more than a count."""
    facts = facts or HostFacts()
    if witness.signal is not None:
        return _by_signal(witness, facts)
    if witness.exit_code is None:
        return Found(Cause.UNKNOWN, f"rank {witness.rank} has not ended")
    return _by_code(witness, witness.exit_code, facts)


def cause_of_alarm(alarm: Alarm) -> Found:
    """What an alarm alone says, before anybody is blamed for it."""
    match alarm.kind:
        case "stopped":
            return Found(Cause.STOPPED, alarm.reason)
        case "silent":
            return Found(Cause.BEAT_LAPSE, alarm.reason)
        case "node":
            return Found(Cause.NODE_SILENT, alarm.reason)
        case "exit":
            return Found(Cause.UNKNOWN, alarm.reason)


def is_peer_error(witness: Witness) -> bool:
    """Whether it ended with the word that another one went away, by exit code or, in a loop that knows no such code, by what it raised."""
    if witness.signal is not None or witness.exit_code in (None, EXIT_DONE):
        return False
    if witness.exit_code == EXIT_RETRY:
        return True
    if witness.error is not None and witness.error.get("code") == "peer-lost":
        return True
    return witness.exit_code not in DELIBERATE_CODES and bool(_PEER_WORDS.search(_last_words(witness)))


def fingerprint_of(lines: Sequence[str]) -> str:
    """Type and innermost frame of the last traceback in these lines of stderr: "ValueError at model.py:12 in forward"; empty without one.

    The end of a traceback is enough, so lines cut off above it do no harm.
    """
    frame, kind = "", ""
    for line in lines:
        if (found := _FRAME.match(line)) is not None:
            frame, kind = f"{found['file'].rsplit('/', 1)[-1]}:{found['line']} in {found['function']}", ""
        elif frame and not kind and not line.startswith((" ", "\t")) and (raised := _RAISED.match(line)) is not None:
            kind = raised["type"]
    return f"{kind.rsplit('.', 1)[-1]} at {frame}" if kind and frame else ""


def crash_fingerprint(lines: Iterable[str]) -> str:
    """The innermost Python frame that faulthandler wrote for the crashing thread, which it lists first; empty where it wrote none."""
    inside = False
    for line in lines:
        inside = inside or line.startswith("Current thread")
        if inside and (found := _FRAME.match(line)) is not None:
            return f"{found['file'].rsplit('/', 1)[-1]}:{found['line']} in {found['function']}"
    return ""


def error_lines(witness: Witness) -> tuple[str, ...]:
    """The last lines of its stderr, as whoever gathered the evidence left them in `details`."""
    lines = witness.details.get("last_error_lines", ())
    return tuple(str(line) for line in lines) if isinstance(lines, Sequence) and not isinstance(lines, str) else ()


def _by_signal(witness: Witness, facts: HostFacts) -> Found:
    number = witness.signal
    who = f"rank {witness.rank}"
    if number == signal.SIGKILL and witness.pid in facts.oom_pids:
        return Found(Cause.HOST_OOM, f"the kernel killed {who} (pid {witness.pid}) for lack of host memory, by its log", "host-oom")
    if number == signal.SIGKILL and facts.num_oom_kills > 0:
        words = f"{who} was killed by SIGKILL and the kernel has counted {facts.num_oom_kills} kills for lack of memory since the start"
        return Found(Cause.HOST_OOM, words, "host-oom")
    if number == signal.SIGKILL:
        return Found(Cause.KILLED, f"{who} was killed by SIGKILL, and the kernel counted no kill for lack of memory")
    if number in _CRASHES:
        place = crash_fingerprint(error_lines(witness))
        return Found(Cause.SEGFAULT, _at(f"{who} crashed by {_name(number)}", place), f"{_name(number)} at {place}" if place else "")
    if number == signal.SIGABRT:
        place = crash_fingerprint(error_lines(witness))
        return Found(Cause.ABORTED, _at(f"a library aborted {who}", place), f"SIGABRT at {place}" if place else "")
    if number == signal.SIGTERM and facts.asked_to_leave:
        return Found(Cause.PREEMPTION, f"{who} was ended by SIGTERM after the job was asked to leave")
    return Found(Cause.KILLED, f"{who} was killed by {_name(number)}")


def _by_code(witness: Witness, code: int, facts: HostFacts) -> Found:
    who, words = f"rank {witness.rank}", _last_words(witness)
    if code == EXIT_DONE:
        return Found(Cause.UNKNOWN, f"{who} is done")
    if facts.xids and code not in DELIBERATE_CODES:
        return Found(Cause.XID, f"{who} left with exit code {code} and the driver logged {', '.join(facts.xids)}")
    if any(mark in words for mark in _OOM_TYPES):
        return Found(Cause.DEVICE_OOM, f"{who} ran out of memory on its device", fingerprint_of(error_lines(witness)) or "device-oom")
    if witness.error is not None and witness.error.get("code") == "preempted":
        return Found(Cause.PREEMPTION, f"{who} left as it was asked to")
    if is_peer_error(witness):
        timed_out = _TIMEOUT_WORDS.search(words) is not None
        cause = Cause.COLLECTIVE_TIMEOUT if timed_out else Cause.PEER_LOST
        return Found(cause, f"{who} {'waited in vain for' if timed_out else 'lost'} a peer")
    if code in DELIBERATE_CODES:
        return Found(Cause.DELIBERATE, f"{who} ended the run with exit code {code}")
    fingerprint = fingerprint_of(error_lines(witness))
    return Found(Cause.EXCEPTION, f"{who} {f'raised {fingerprint}' if fingerprint else f'left with exit code {code}'}", fingerprint)


def _last_words(witness: Witness) -> str:
    """What it said last, in one line: the error that it left, else the last line of stderr that begins at the margin."""
    error: Mapping[str, object] = witness.error or {}
    said = [line for line in error_lines(witness)[-12:] if line and not line.startswith((" ", "\t"))]
    return " ".join([str(error.get("what", "")), *said[-1:]]).strip()


def _at(words: str, place: str) -> str:
    return f"{words} at {place}" if place else words


def _name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"  # real-time signals have no name
