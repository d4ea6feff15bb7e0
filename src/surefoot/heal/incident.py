"""An incident: what happened, when, which steps, samples and ranks, and what was done about it, folded from the ledger. Pure.

Its id is the one of its episode, `e<seq of episode.opened>`; it has a folder `incidents/<id>/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.heal.alert_kinds import ranks_of

INCIDENT_FORMAT: Final = 1
INCIDENT_NAME: Final = "incident.json"
_ACTIONS: Final = (
    Event.RUN_ROLLED_BACK,
    Event.UPDATE_SKIPPED,
    Event.STEP_RECHECKED,
    Event.BLOCK_ASKED,
    Event.BLOCK_TAKEN,
    Event.BLOCK_REFUSED,
    Event.CHECKPOINT_SUSPECTED,
    Event.CHECKPOINT_ABANDONED,
    Event.RUN_PAUSED,
    Event.RUN_HALTED,
    Event.RUN_RELEASED,
)


def episode_ids(entries: Iterable[LedgerEntry]) -> list[str]:
    return [f"e{entry.seq}" for entry in entries if entry.event == Event.EPISODE_OPENED]


def episode_of(entry: LedgerEntry) -> str:
    """The episode that `entry` moves; empty when it moves none."""
    if entry.event == Event.EPISODE_OPENED:
        return f"e{entry.seq}"
    moves = (Event.EPISODE_DIAGNOSED, Event.EPISODE_CLOSED, Event.RUN_ROLLED_BACK)
    return str(entry.fields.get("episode") or "") if entry.event in moves else ""


def incident_of(entries: Sequence[LedgerEntry], episode: str) -> dict[str, Any] | None:
    """What the ledger tells of `episode`; None when it opened none of that id."""
    opened = next((entry for entry in entries if entry.event == Event.EPISODE_OPENED and f"e{entry.seq}" == episode), None)
    if opened is None:
        return None
    diagnosed = _newest(entries, Event.EPISODE_DIAGNOSED, episode)
    closed = _newest(entries, Event.EPISODE_CLOSED, episode)
    until = closed.seq if closed is not None else entries[-1].seq
    during = [entry for entry in entries if opened.seq <= entry.seq <= until]
    told = diagnosed.fields if diagnosed is not None else {}
    onset = opened.fields.get("onset_step", opened.step)
    return {
        "format_version": INCIDENT_FORMAT,
        "id": episode,
        "what": opened.reason,
        "rule": opened.rule,
        "state": "closed" if closed is not None else "open",
        "opened_utc": opened.time_utc,
        "closed_utc": closed.time_utc if closed is not None else None,
        "onset_step": onset,
        "steps": told.get("steps") or [onset, opened.fields.get("detected_step", opened.step)],
        "samples": told.get("samples") or opened.fields.get("samples"),
        "cause": told.get("cause"),
        "why": diagnosed.reason if diagnosed is not None else None,
        "ranks": list(ranks_of(diagnosed) or ranks_of(opened)) if diagnosed is not None else list(ranks_of(opened)),
        "findings": [_told(entry) for entry in _findings(entries, opened, until=until)],
        "actions": [_told(entry) for entry in during if entry.event in {event.value for event in _ACTIONS}],
        "seqs": [opened.seq, until],
        "documents": None,
        "documents_note": f"`surefoot triage RUN --incident {episode}` looks at them, where the run's data is at hand",
    }


def with_documents(record: Mapping[str, Any], documents: Sequence[Mapping[str, Any]] | None, note: str) -> dict[str, Any]:
    """`record` with the documents of its samples, or with why they could not be looked at."""
    return {**record, "documents": None if documents is None else [dict(document) for document in documents], "documents_note": note}


def keeping_documents(record: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """`record` with what an earlier one held of documents, as long as it is about the same samples."""
    if before.get("documents") is None or before.get("samples") != record["samples"]:
        return dict(record)
    return with_documents(record, before["documents"], str(before.get("documents_note", "")))


def _findings(entries: Sequence[LedgerEntry], opened: LedgerEntry, *, until: int) -> list[LedgerEntry]:
    """Those that led to it lie before it, from its onset on and in its attempt; the others came while it was open."""
    onset = opened.fields.get("onset_step")
    first = onset if isinstance(onset, int) else opened.step

    def belongs(entry: LedgerEntry) -> bool:
        if entry.event != Event.ANOMALY_FOUND or entry.seq > until:
            return False
        return entry.seq > opened.seq or (entry.attempt == opened.attempt and entry.step >= first - 1)

    return [entry for entry in entries if belongs(entry)]


def _newest(entries: Sequence[LedgerEntry], event: Event, episode: str) -> LedgerEntry | None:
    return next((entry for entry in reversed(entries) if entry.event == event and entry.fields.get("episode") == episode), None)


def _told(entry: LedgerEntry) -> dict[str, Any]:
    return {
        "seq": entry.seq,
        "time_utc": entry.time_utc,
        "step": entry.step,
        "event": entry.event,
        "rule": entry.fields.get("rule") or entry.rule,
        "reason": entry.reason,
        "fields": dict(entry.fields),
    }
