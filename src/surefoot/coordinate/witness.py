"""What is known about every rank at the moment of an alarm: seen from outside, and said by itself where it still could. Records only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from surefoot.coordinate.beats import Beat


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why somebody looked closer. `ranks` are those that it was raised about, victims among them; `limit_s` the bound that was broken.

    stopped: the kernel says that the process is stopped (state T). silent: it did not move for longer than its phase may take. exit: it
    ended. node: another node is gone.
    """

    kind: Literal["stopped", "silent", "exit", "node"]
    ranks: tuple[int, ...]
    reason: str
    detected_mono_s: float
    phase: str = ""
    age_s: float = 0.0
    limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupState:
    """One process group as one rank has it: sequence numbers of the last collective that it enqueued and of the last that was completed.

    `operation` is the last enqueued one, "gloo:all_reduce", with the shapes and dtypes of its inputs. Sequence numbers of collectives and
    of point-to-point operations are different series: `is_p2p` says which one this is.
    """

    name: str
    last_enqueued: int
    last_completed: int
    operation: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    is_p2p: bool = False


@dataclass(frozen=True, slots=True)
class Witness:
    """One rank. `process_state` is the letter of /proc/PID/stat, empty when the process is gone; `age_s` how long ago its last beat was.

    `groups` is what the rank said itself; None where it did not answer in time, which is evidence too: of a stopped process, or of one
    that holds the interpreter. `stack` are the innermost frames of its main thread, innermost first.
    """

    rank: int
    pid: int | None
    process_state: str
    beat: Beat | None
    age_s: float
    node: str = ""
    exit_code: int | None = None
    signal: int | None = None
    exit_mono_s: float | None = None
    error: Mapping[str, object] | None = None
    groups: tuple[GroupState, ...] | None = None
    stack: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)
