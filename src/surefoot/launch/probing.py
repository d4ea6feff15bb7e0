"""Between two generations: what this node shows of itself, by the quick probes, written beside the evidence of the loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from surefoot.coordinate.probes.checks import ProbeWish
from surefoot.coordinate.probes.records import ProbeResult
from surefoot.coordinate.probes.run import QUICK, run_probes
from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.core.sections import LaunchSection

logger = logging.getLogger(__name__)


def probe_after_fault(
    settings: LaunchSection, *, run_dir: Path, evidence: Path | None, since_boot_s: float, look: Callable[[], None]
) -> tuple[ProbeResult, ...]:
    """Empty where nobody asked for it. Takes at most `probe_limit_s`; what it finds is evidence, and stops nothing by itself.

    `since_boot_s`: what the kernel logged before belongs to an earlier generation.
    """
    if settings.probe_after_fault == "off":
        return ()
    wish = ProbeWish(folder=str(run_dir), port_gbps=settings.port_gbps, since_boot_s=since_boot_s)
    results = run_probes(QUICK, wish, limit_s=settings.probe_limit_s, look=look)
    for result in results:
        if result.verdict in ("failed", "hung"):
            logger.warning("probe %s: %s: %s", result.name, result.verdict, result.reason)
    if evidence is not None:
        try:
            _write(evidence, results)
        except (OSError, ValueError) as error:
            logger.warning("what the probes found could not be written down: %s", error)
    return results


def _write(evidence: Path, results: tuple[ProbeResult, ...]) -> None:
    """Under `probes` of an incident's file; beside what else is in it where it is a folder."""
    found = [strict_json.plain(result) for result in results]
    if evidence.is_dir():
        write_atomic(evidence / "probes.json", strict_json.dumps({"probes": found}, indent=2))
        return
    incident = strict_json.loads(evidence.read_bytes())
    if isinstance(incident, dict):
        write_atomic(evidence, strict_json.dumps({**incident, "probes": found}, indent=2))
