"""Who works beside the ranks of a run under the agent."""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.checkpoint.inspect import published
from surefoot.cli.alerter import alert_aides
from surefoot.cli.mirror import mirror_aides
from surefoot.cli.telemetry import telemetry_aides
from surefoot.core.sections import AlertsSection, CheckpointSection, DataSection, LaunchSection
from surefoot.launch.aide import AideSpec


def aides_of(
    section: CheckpointSection, run_dir: Path, *, data: DataSection, alerts: AlertsSection, launch: LaunchSection
) -> list[AideSpec]:
    """In the order in which they end: what one brings home, the next ones copy and load.

    The uploader brings what is in the slots to disk, so it is there only where ranks stage in the agent's memory. The look-ahead has
    nothing to finish, nor has the telemetry. The alerter comes last: what the others find at the end is news too.
    """
    aides = []
    if "memory" in section.tiers:
        aides.append(AideSpec("uploader", _argv("uploader", run_dir), end_limit_s=section.upload_limit_s, keeps_slots=True))
    aides += mirror_aides(section, run_dir=run_dir)
    if section.prove:
        root = run_dir / "checkpoints"
        aides.append(
            AideSpec(
                "prover",
                _argv("prover", run_dir),
                end_limit_s=section.prove_end_s,
                only_when_finished=True,
                wanted=lambda: bool(published(root)),
            )
        )
    if data.look_ahead_samples and data.path:
        has_begun = run_dir / "metrics"
        aides.append(AideSpec("look-ahead", _argv("look_ahead", run_dir), end_limit_s=0.0, wanted=has_begun.is_dir))
    aides += telemetry_aides(launch, run_dir=run_dir)
    return aides + alert_aides(alerts, run_dir=run_dir)


def _argv(name: str, run_dir: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", f"surefoot.cli.{name}", "--run-dir", str(run_dir.absolute()))
