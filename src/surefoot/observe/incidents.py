"""The names of what went wrong in a run: episodes in its ledger (`e<seq>`), and what else has a place under `incidents/`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry

INCIDENTS_NAME = "incidents"
_MAX_NAMED = 8


def open_episodes(entries: Iterable[LedgerEntry]) -> list[str]:
    """The ids of the episodes that nobody has closed, oldest first."""
    standing: dict[str, None] = {}
    for entry in entries:
        if entry.event == Event.EPISODE_OPENED:
            standing[f"e{entry.seq}"] = None
        elif entry.event == Event.EPISODE_CLOSED:
            standing.pop(str(entry.fields.get("episode")), None)
    return list(standing)


def known_incidents(run_dir: Path, entries: Iterable[LedgerEntry]) -> list[str]:
    """Every name there is, oldest episode first."""
    episodes = [f"e{entry.seq}" for entry in entries if entry.event == Event.EPISODE_OPENED]
    folder = run_dir / INCIDENTS_NAME
    filed = sorted(path.name if path.is_dir() else path.stem for path in folder.iterdir()) if folder.is_dir() else []
    return list(dict.fromkeys([*episodes, *filed]))


def refuse_unknown_incident(incident: str, *, run_dir: Path, entries: Iterable[LedgerEntry]) -> str:
    """Why `incident` names nothing of this run; empty when it does."""
    known = known_incidents(run_dir, entries)
    if incident in known:
        return ""
    there = ", ".join(known[-_MAX_NAMED:])
    return f"there is no incident {incident}; " + (f"the newest are {there}" if there else "this run has none")
