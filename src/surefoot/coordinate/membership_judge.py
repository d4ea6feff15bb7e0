"""What an incident on several nodes means: one fault of the whole job, judged by the same grades and the same budget as on one machine."""

from __future__ import annotations

from dataclasses import replace

from surefoot.coordinate.causes import Cause
from surefoot.coordinate.members import Incident, Judge
from surefoot.coordinate.restart import RestartHistory, decide
from surefoot.core.errors import EXIT_RETRY
from surefoot.core.records import Fault, Instruction
from surefoot.core.sections import LaunchSection

_VICTIMS = (Cause.PEER_LOST.value, Cause.COLLECTIVE_TIMEOUT.value)


def judge_by(limits: LaunchSection) -> Judge:
    """The judge of a job: pure, so that a journal that is replayed judges the same."""

    def judge(history: RestartHistory, incident: Incident) -> tuple[Instruction, RestartHistory]:
        return decide(history, the_fault(incident), limits)

    return judge


def the_fault(incident: Incident) -> Fault:
    """A lost node explains what its peers tell, and a rank that ended by itself explains those that only missed a peer."""
    faults = incident.faults
    worst = min(faults, key=lambda fault: (fault.what != "node", fault.cause in _VICTIMS or fault.exit_code == EXIT_RETRY))
    step = max(incident.step, *(fault.step for fault in faults))
    fault = replace(worst, step=step, step_known=worst.step_known or step > 0, num_nodes=incident.num_nodes, utc_s=incident.utc_s)
    if not incident.lost:
        return fault
    others = f", and {len(incident.lost) - 1} more" if len(incident.lost) > 1 else ""
    return replace(fault, reason=f"{fault.reason}{others}", cause=Cause.NODE_SILENT.value, nodes=incident.lost)
