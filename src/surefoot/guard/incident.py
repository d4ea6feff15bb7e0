"""The folder of an incident in the run folder: `incidents/<id>/incident.json`, written by rank 0 whenever its episode moves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.core.errors import SurefootError
from surefoot.core.records import LedgerEntry
from surefoot.heal.incident import INCIDENT_NAME, episode_of, incident_of, keeping_documents
from surefoot.observe.ledger import read_ledger

logger = logging.getLogger(__name__)


def write_incident(ledger: Path, entry: LedgerEntry) -> Path | None:
    """Local, for rank 0, after `entry` stands in `ledger`; does nothing when it moves no episode.

    Never raises into the step: the ledger holds all of it, and `surefoot triage RUN --incident ID` tells it from there.
    """
    episode = episode_of(entry)
    if not episode:
        return None
    path = ledger.parent / "incidents" / episode / INCIDENT_NAME
    try:
        record = incident_of(read_ledger(ledger, up_to_damage=True), episode)
        if record is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, strict_json.dumps(keeping_documents(record, _before(path)), indent=2))
    except (OSError, SurefootError) as error:
        logger.warning("%s could not be written: %s", path, error)
        return None
    return path


def _before(path: Path) -> dict[str, Any]:
    """What the file holds already; nothing where it is not there, or cannot be read."""
    try:
        told = strict_json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
