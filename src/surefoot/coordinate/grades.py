"""How bad a fault is, with the reason: one process, one node, many nodes at once, the program itself, or nobody's fault at all. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot.coordinate.causes import Cause
from surefoot.core.errors import EXIT_RETRY, Deterministic, Held, error_for_exit_code
from surefoot.core.records import Fault, Grade
from surefoot.core.sections import LaunchSection

# The same workers would end the same way: what these codes say can only be mended from outside.
_FINAL: Mapping[int, Grade] = {
    2: Grade.DETERMINISTIC,
    3: Grade.DETERMINISTIC,
    4: Grade.DETERMINISTIC,
    5: Grade.DETERMINISTIC,
    6: Grade.PLANNED,
    7: Grade.LARGE_SCALE,
    93: Grade.DETERMINISTIC,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the program as it is recognised: in the step after `step` finished ones."""

    step: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class NodeLoss:
    node: str
    utc_s: float


@dataclass(frozen=True, slots=True)
class Graded:
    """`exit_code` is that of the stop that the grade alone demands; 0 where a restart may help."""

    grade: Grade
    reason: str
    exit_code: int = 0


def grade(fault: Fault, *, failures: Iterable[Failure], lost_nodes: Iterable[NodeLoss], limits: LaunchSection) -> Graded:
    """`failures` are those before this one that no checkpoint lies behind; `lost_nodes` those before, however old."""
    code = fault.exit_code
    if code is not None and code in _FINAL:
        return Graded(_FINAL[code], f"{error_for_exit_code(code).__name__}: a restart would end the same way", code)
    if fault.cause == Cause.PREEMPTION:
        return Graded(Grade.PLANNED, "asked to leave", EXIT_RETRY)
    if (why := large_scale(fault, lost_nodes=lost_nodes, limits=limits)) is not None:
        return Graded(Grade.LARGE_SCALE, why, Held.exit_code)
    if fault.cause == Cause.MISMATCHED_COLLECTIVE:
        return Graded(Grade.DETERMINISTIC, "the ranks run different programs, and would do so again", Deterministic.exit_code)
    if is_repeated(fault, failures):
        why = f"{fault.fingerprint} came twice in the step after {fault.step}, and no checkpoint lies behind it"
        return Graded(Grade.DETERMINISTIC, why, Deterministic.exit_code)
    if fault.nodes:
        return Graded(Grade.NODE, f"node {', '.join(fault.nodes)} is lost")
    if fault.cause in (Cause.NODE_SILENT, Cause.XID) or fault.what == "node":
        return Graded(Grade.NODE, "its node is at fault")
    return Graded(Grade.PROCESS, "one process")


def large_scale(fault: Fault, *, lost_nodes: Iterable[NodeLoss], limits: LaunchSection) -> str | None:
    """Why so many nodes are gone at about the same time that no node is at fault; None when they are not."""
    if not fault.nodes:
        return None
    since_s = fault.utc_s - limits.large_scale_window_s
    gone = {loss.node for loss in lost_nodes if loss.utc_s >= since_s} | set(fault.nodes)
    enough = max(2, math.ceil(limits.large_scale_share * fault.num_nodes))
    if len(gone) >= enough or (fault.num_nodes > 1 and len(gone) > fault.num_nodes / 2):
        window = f"within {limits.large_scale_window_s:g} s"
        return f"{len(gone)} of {fault.num_nodes} nodes were lost {window} ({enough} are many): {', '.join(sorted(gone)[:8])}"
    return None


def is_repeated(fault: Fault, failures: Iterable[Failure]) -> bool:
    """Whether the program failed so before, at this step. A step that nobody knows is equal to no other."""
    return fault.step_known and bool(fault.fingerprint) and Failure(fault.step, fault.fingerprint) in failures
