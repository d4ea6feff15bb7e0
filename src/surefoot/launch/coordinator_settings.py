"""What a coordinator is started with, and how: a process in a session of its own, so that no terminal and no agent takes it along."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from surefoot.coordinate.members import MemberLimits
from surefoot.coordinate.restart import RestartHistory
from surefoot.coordinate.silence import SilenceLimits
from surefoot.core import strict_json
from surefoot.core.sections import LaunchSection


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """What a coordinator is started with; a new one of the same job gets the same.

    `generation` is the newest in the ledger, `history` the budget as the ledger has it.

    It binds `bind`:`port` (0: the kernel chooses) and tells nodes to come to `advertise`. `launch` holds the budget of the whole job.
    """

    run: str
    job: str
    members: MemberLimits
    generation: int = 0
    history: RestartHistory = field(default_factory=RestartHistory)
    bind: str = "127.0.0.1"
    advertise: str = "127.0.0.1"
    port: int = 0
    beat_s: float = 1.0
    idle_s: float = 600.0
    leases: SilenceLimits = field(default_factory=SilenceLimits)
    launch: LaunchSection = field(default_factory=LaunchSection)


def start_coordinator(run_dir: Path, settings: CoordinatorSettings) -> subprocess.Popen[bytes]:
    """Exec it; where it listens stands in `<run>/coordinator.json` once it does. What it says is appended to `logs/coordinator.log`.

    The caller may end and leave it behind. A caller that lives on must `poll` it now and then, or it stays a zombie when it ends.
    """
    log_path = run_dir / "logs" / "coordinator.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "surefoot.launch.coordinator", str(run_dir), strict_json.dumps(asdict(settings))]
    with log_path.open("ab") as log:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
