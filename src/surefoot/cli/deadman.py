"""The dead-man's timer: `python -m surefoot.cli.deadman RUN`, once, from outside the job: cron, a systemd timer or a CronJob elsewhere.

It reads the run folder, pages through the places of [alerts] when the run went silent, once, and says when it is back. What it said last
stands in a file beside the run, which is all that it writes.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from surefoot.cli.alerter import attempt_delivery, sender_of
from surefoot.config import load_config
from surefoot.core import strict_json
from surefoot.core.clock import SystemClock
from surefoot.core.durable import write_atomic
from surefoot.core.errors import EXIT_DONE, EXIT_FAILED, SurefootError
from surefoot.heal.alert_kinds import KINDS
from surefoot.heal.alert_senders import destinations
from surefoot.heal.alerts import trial_alert
from surefoot.observe.run_dir import CONFIG_NAME
from surefoot.report.silence import Finding, judge_silence, signs_of

logger = logging.getLogger(__name__)

STATE_NAME: Final = "deadman.json"
# Longer than any save or evaluation that is watched by a limit of its own, and short next to a night.
SILENT_S: Final = 300.0
_KIND: Final = {"run-gone": "run-silent", "telemetry-gone": "telemetry-silent", "none": "run-back"}


def look(run_dir: Path, *, silent_s: float) -> tuple[Finding, bool]:
    """What is found, and whether all that had to be told arrived. A page that reached nobody is tried again by the next look."""
    clock = SystemClock()
    signs, status = signs_of(run_dir, clock=clock)
    found = judge_silence(signs, silent_s=silent_s)
    told = _told(run_dir)
    if found.silence == told:
        return found, True
    config = load_config(run_dir / CONFIG_NAME).config
    sender = sender_of(config.alerts, run=config.run.name, run_dir=run_dir)
    kind = KINDS[_KIND[found.silence]]
    alert = replace(
        trial_alert(sender, time_utc=clock.utc()),
        kind=kind.name,
        severity=kind.severity,
        step=int(status["step"] or 0),
        attempt=int(status["attempt"]),
        generation=int(status["generation"]),
        what=found.reason,
        where=f"step {status['step']}",
        action=kind.action,
        command=kind.command.replace("RUN", str(run_dir)),
        runbook=f"{sender.runbook}#{kind.name}" if sender.runbook else f"runbook entry: {kind.name}",
    )
    places = destinations(config.alerts, environ=os.environ, host=socket.gethostname())
    failed = {place.name: words for place in places if (words := attempt_delivery(place, alert, timeout_s=config.alerts.timeout_s))}
    for name, words in failed.items():
        logger.warning("a page to %s failed: %s", name, words)
    if len(failed) < len(places):
        write_atomic(run_dir / STATE_NAME, strict_json.dumps({"told": found.silence, "time_utc": clock.utc()}))
    elif not places:
        logger.warning("[alerts] of the run names no place: this is told here alone")
    return found, len(failed) < len(places)


def _told(run_dir: Path) -> str:
    try:
        return str(strict_json.loads((run_dir / STATE_NAME).read_bytes())["told"])
    except (OSError, ValueError, KeyError, TypeError):
        return "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the run is not silent, 1 when it is, or when nobody could be told."""
    parser = argparse.ArgumentParser(prog="surefoot.cli.deadman")
    parser.add_argument("run", type=Path)
    parser.add_argument("--silent-s", type=float, default=SILENT_S, help="no sign for so many seconds is silence")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    try:
        found, is_told = look(options.run, silent_s=options.silent_s)
    except SurefootError as error:
        logger.error("%s", error)
        return error.exit_code
    except OSError as error:
        logger.error("what was told could not be noted in the run folder, and is told again: %s", error)
        return EXIT_FAILED
    logger.warning("%s: %s", found.silence, found.reason)
    return EXIT_DONE if found.silence == "none" and is_told else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
