"""An ending as the policy and the ledger are told of it. Pure."""

from __future__ import annotations

from surefoot.coordinate.causes import Cause
from surefoot.core.records import Fault
from surefoot.launch.ending import Ending
from surefoot.launch.recovery_split import detected_after_s

# The exit says all that is known of these; of the others the verdict knows more.
_PLAIN = frozenset({Cause.KILLED, Cause.UNKNOWN, Cause.DELIBERATE, Cause.PEER_LOST})


def fault_of(ending: Ending, *, step: int, step_known: bool) -> Fault:
    """Who was lost and how. The verdict names the rank; its own exit is told with it, and nobody else's."""
    verdict, ended = ending.verdict, ending.culprit
    if verdict is not None and verdict.ranks and ended is not None and ended.rank not in verdict.ranks:
        ended = None  # a victim that spoke first
    if ending.nursery_code is not None:
        code, number = (ending.nursery_code, None) if ending.nursery_code >= 0 else (None, -ending.nursery_code)
    else:
        code, number = (ended.exit_code, ended.signal) if ended is not None else (None, None)
    rank = ended.rank if ended is not None else verdict.ranks[0] if verdict is not None and len(verdict.ranks) == 1 else None
    plain = verdict is None or (ending.culprit is ended is not None and verdict.cause in _PLAIN)
    return Fault(
        ending.what or "rank",
        ending.reason if verdict is None or plain else verdict.reason,
        rank,
        code,
        number,
        step,
        ending.detected_mono_s,
        cause=verdict.cause.value if verdict is not None else "",
        fingerprint=verdict.fingerprint if verdict is not None else "",
        step_known=step_known,
        nodes=verdict.nodes if verdict is not None and ending.what == "node" else (),
    )


def loss_fields(ending: Ending, fault: Fault) -> dict[str, object]:
    """For the ledger."""
    verdict = ending.verdict
    told: dict[str, object] = {
        "rank": fault.rank,
        "exit_code": fault.exit_code,
        "signal": fault.signal,
        "detected_s": round(detected_after_s(ending), 3),
        "step_known": fault.step_known,
    }
    if verdict is None:
        return told
    collective = verdict.collective
    return {
        **told,
        "ranks": list(verdict.ranks),
        "candidates": list(verdict.candidates),
        "nodes": list(verdict.nodes),
        "cause": fault.cause,
        "fingerprint": fault.fingerprint,
        "confidence": verdict.confidence,
        "collective": f"{collective.name} {collective.last_enqueued} {collective.operation}" if collective is not None else None,
    }
