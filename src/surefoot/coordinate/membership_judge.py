"""What an incident of a job on several nodes means: large, then it is held; else the budget of the whole job decides."""

from __future__ import annotations

from surefoot.coordinate.members import Incident, Judge
from surefoot.coordinate.restart import RestartHistory, decide
from surefoot.core.errors import Held
from surefoot.core.records import Grade, Instruction
from surefoot.core.sections import LaunchSection

_LARGE_SHARE = 0.1
"""Two nodes or a tenth, whichever is more, do not fail at once by themselves: a switch, power, storage, or this coordinator's own link."""


def judge_by(limits: LaunchSection) -> Judge:
    """The judge of a job: pure, so that a journal that is replayed judges the same."""

    def judge(history: RestartHistory, incident: Incident) -> tuple[Instruction, RestartHistory]:
        enough = max(2.0, _LARGE_SHARE * incident.num_nodes)
        if len(incident.lost) >= enough:
            names = ", ".join(incident.lost[:8]) + (" ..." if len(incident.lost) > 8 else "")
            reason = f"{len(incident.lost)} of {incident.num_nodes} nodes were lost at once ({names}): held, a restart would meet the same"
            return Instruction("stop", reason, Grade.LARGE_SCALE, exit_code=Held.exit_code), history
        return decide(history, incident.faults[0], limits)

    return judge
