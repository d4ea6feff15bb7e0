"""The faults that can be rehearsed: what is done, what a run must make of it, and what those need that cannot run yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from surefoot.core.errors import ConfigError
from surefoot.core.records import Grade

How = Literal["signal", "inside", "leave"]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run must make of the fault. `bound_s` from the fault to its detection; with `waits` on top of the limit of the phase.

    `blamed`: the rank it was done to, that rank among others (two that call different collectives are both named), or nobody.
    """

    action: Literal["restart", "stop", "leave"]
    grade: Grade
    exit_code: int
    bound_s: float
    waits: bool = False
    blamed: Literal["rank", "among", "nobody"] = "rank"


@dataclass(frozen=True, slots=True)
class Drill:
    """`fault` in words. `how` it is done: a signal to the rank, by the rank itself, a signal to the agent. `needs` says what is missing
    where it cannot run; then `expected` is None."""

    number: int
    name: str
    fault: str
    how: How | None = None
    order: str = ""
    expected: Expected | None = None
    needs: str = ""

    @property
    def can_run(self) -> bool:
        return self.expected is not None


_SEVERAL_NODES = "several nodes"
_STORED = "a fault in what is stored or in memory, and the audit that finds it"
_NUMBERS = "a fault in numbers or data, and the detectors that find it"


def _drills() -> tuple[Drill, ...]:
    killed = Expected("restart", Grade.PROCESS, 0, bound_s=1.0)
    stopped = Expected("restart", Grade.PROCESS, 0, bound_s=5.0)
    hung = Expected("restart", Grade.PROCESS, 0, bound_s=2.0, waits=True)
    mismatched = Expected("stop", Grade.DETERMINISTIC, 93, bound_s=2.0, waits=True, blamed="among")
    twice = Expected("stop", Grade.DETERMINISTIC, 93, bound_s=2.0)
    preempted = Expected("leave", Grade.PLANNED, 75, bound_s=5.0, blamed="nobody")
    return (
        Drill(1, "kill-a-rank", "SIGKILL to a rank", "signal", "SIGKILL", killed),
        Drill(2, "stop-a-rank", "SIGSTOP to a rank", "signal", "SIGSTOP", stopped),
        Drill(3, "hung-rank", "a rank loops in Python while its peers wait in a collective", "inside", "busy-loop", hung),
        Drill(4, "slow-rank", "a rank is slowed by 30%", needs="the straggler's seat in the loop"),
        Drill(5, "mismatched-collective", "a rank calls another collective", "inside", "mismatched-collective", mismatched),
        Drill(6, "cut-a-node-off", "packets to and from a node are dropped", needs=_SEVERAL_NODES),
        Drill(7, "packet-loss-on-a-link", "30% of the packets of a link are lost", needs=_SEVERAL_NODES),
        Drill(8, "kill-an-agent", "SIGKILL to an agent and its workers", needs=_SEVERAL_NODES),
        Drill(9, "kill-the-coordinator", "SIGKILL to the coordinator", needs=_SEVERAL_NODES),
        Drill(10, "large-scale-loss", "most nodes die at once", needs=_SEVERAL_NODES),
        Drill(11, "node-joins", "a node joins a run", needs=_SEVERAL_NODES),
        Drill(12, "same-step-twice", "a rank raises at the same step in every generation", "inside", "exception", twice),
        Drill(13, "kill-during-save", "SIGKILL to a rank while a save is written", needs="a moment within a save to strike at"),
        Drill(14, "kill-during-restore", "SIGKILL to a rank while it restores", needs="a moment within a restore to strike at"),
        Drill(15, "truncate-a-shard", "a file of a checkpoint is cut short", needs=_STORED),
        Drill(16, "flip-a-bit-in-a-shard", "a bit of a file of a checkpoint", needs=_STORED),
        Drill(17, "flip-a-bit-in-host-memory", "a bit of a staged copy", needs=_STORED),
        Drill(18, "flip-a-bit-in-a-gradient", "a bit of a gradient", needs=_NUMBERS),
        Drill(19, "flip-a-bit-in-a-parameter", "a bit of a parameter at rest", needs=_NUMBERS),
        Drill(20, "biased-contribution", "a rank adds a wrong share to each sum", needs=_NUMBERS),
        Drill(21, "nan-in-a-batch", "a batch whose loss is no number", needs=_NUMBERS),
        Drill(22, "poisonous-document", "a document that the loss jumps at", needs=_NUMBERS),
        Drill(23, "schedule-bug", "a learning rate that is not the schedule's", needs=_NUMBERS),
        Drill(24, "lost-optimizer-state", "moments that are zero after a resume", needs=_NUMBERS),
        Drill(25, "wrong-seed-on-one-rank", "a rank draws other random numbers", needs=_NUMBERS),
        Drill(26, "disk-full", "no room for a save", needs="a file system of its own to fill"),
        Drill(27, "object-store-failing", "a store that answers with errors", needs="a store to break"),
        Drill(28, "out-of-memory", "a rank that the kernel kills for its memory", needs="a memory cgroup of its own"),
        Drill(29, "preemption", "SIGTERM to the agent, and the same command again", "leave", "SIGTERM", preempted),
        Drill(30, "changed-config-on-resume", "another config at a resume", needs="a second config to start with"),
        Drill(31, "topology-change", "another number of ranks at a resume", needs="a second layout to start with"),
    )


CATALOGUE: Mapping[str, Drill] = {drill.name: drill for drill in _drills()}


def find_drill(name: str) -> Drill:
    """Raises ConfigError when there is none of that name, or it cannot run yet."""
    drill = CATALOGUE.get(name)
    if drill is None:
        close = get_close_matches(name, CATALOGUE, n=1)
        hint = f"did you mean {close[0]}?" if close else "`surefoot drill list` names them"
        raise ConfigError(f"there is no drill {name}", where="drill", hint=hint)
    if not drill.can_run:
        can = ", ".join(other.name for other in CATALOGUE.values() if other.can_run)
        raise ConfigError(f"{name} cannot run in this release: it needs {drill.needs}", where="drill", hint=f"these can: {can}")
    return drill
