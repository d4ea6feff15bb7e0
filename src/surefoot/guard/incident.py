"""The folder of an incident in the run folder: `incidents/<id>/incident.json`, written by rank 0 whenever its episode moves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.core.records import LedgerEntry
from surefoot.heal.incident import incident_of

logger = logging.getLogger(__name__)

INCIDENT_NAME = "incident.json"


def write_incident(run_dir: Path, entries: Sequence[LedgerEntry], *, episode: str) -> Path | None:
    """Local, for rank 0. Never raises into the step: the ledger holds all of it, and `surefoot triage --incident` tells it from there."""
    record = incident_of(entries, episode)
    if record is None:
        return None
    path = run_dir / "incidents" / episode / INCIDENT_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, strict_json.dumps(record, indent=2))
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)
        return None
    return path
