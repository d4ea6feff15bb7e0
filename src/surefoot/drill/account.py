"""What became of an injected fault, from what the run wrote down: ledger, incident, rows of its metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.core.events import Event
from surefoot.core.holder import seconds_between
from surefoot.core.records import LedgerEntry

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """Times in seconds after the fault; None where the run did not say. `limit_s` is the bound of the phase that was broken.

    `grade`, `action` and `exit_code` are those of the last decision about the fault; `resumed_step` is where training went on.
    """

    injected: LedgerEntry
    detected_s: float | None
    limit_s: float | None
    culprit: Json | None
    grade: str | None
    action: str | None
    exit_code: int | None
    resumed_step: int | None
    steps_lost: int | None
    recovery: Mapping[str, float]


def account(entries: Sequence[LedgerEntry], *, incidents: Mapping[int, Json], first_rows: Mapping[int, float]) -> Seen | None:
    """`incidents` by generation; `first_rows` is the monotonic time of the first row of the metrics by generation. None where nothing was
    injected."""
    injected = next((entry for entry in entries if entry.event == Event.DRILL_INJECTED), None)
    if injected is None:
        return None
    after = [entry for entry in entries if entry.seq > injected.seq]
    lost = _first(after, Event.RANK_LOST, Event.NURSERY_LOST, Event.RUN_LEFT)
    incident = incidents.get(injected.generation, {})
    decided = next((entry for entry in reversed(after) if entry.event == Event.RESTART_DECIDED), None)
    attempt = _first(after, Event.ATTEMPT_STARTED)
    detected_s = _detected_s(injected, lost, incident)
    kind = decided.fields.get("kind") if decided is not None else None
    resumed_step = attempt.step if attempt is not None else None
    at_fault = max(injected.step, lost.step if lost is not None else 0)
    return Seen(
        injected=injected,
        detected_s=detected_s,
        limit_s=_number(_part(incident, "alarm").get("limit_s")),
        culprit=_culprit(incident, lost),
        grade=decided.rule if decided is not None else None,
        action=str(kind) if kind is not None else ("leave" if lost is not None and lost.event == Event.RUN_LEFT else None),
        exit_code=_whole(decided.fields.get("exit_code")) if decided is not None else None,
        resumed_step=resumed_step,
        steps_lost=max(0, at_fault - resumed_step) if resumed_step is not None else None,
        recovery=_recovery(injected, after, detected_s, first_rows),
    )


def _first(entries: Sequence[LedgerEntry], *events: Event) -> LedgerEntry | None:
    return next((entry for entry in entries if entry.event in events), None)


def _detected_s(injected: LedgerEntry, lost: LedgerEntry | None, incident: Json) -> float | None:
    """By the clock that both processes share where the run says when it saw it; else by the stamps of what it wrote then."""
    seen_s = _number(_part(incident, "alarm").get("detected_mono_s")) or _number(incident.get("detected_mono_s"))
    injected_s = _number(injected.fields.get("mono_s"))
    if seen_s is not None and injected_s is not None:
        return round(seen_s - injected_s, 3)
    stamp = incident.get("time_utc") or (lost.time_utc if lost is not None else None)
    return round(seconds_between(injected.time_utc, str(stamp)), 3) if stamp is not None else None


def _culprit(incident: Json, lost: LedgerEntry | None) -> Json | None:
    told = incident.get("culprit")
    if isinstance(told, Mapping):
        ranks = told["ranks"] if "ranks" in told else [told["rank"]]
        names = ("candidates", "nodes", "cause", "confidence", "reason")
        return {"ranks": list(ranks), **{name: told[name] for name in names if name in told}}
    rank = lost.fields.get("rank") if lost is not None else None
    return {"ranks": [rank]} if isinstance(rank, int) else None


def _recovery(
    injected: LedgerEntry, after: Sequence[LedgerEntry], detected_s: float | None, first_rows: Mapping[int, float]
) -> dict[str, float]:
    """The split as the run measured it, and the whole: from the detection to the end of the first step of the next generation."""
    told = next((entry.fields["recovery"] for entry in after if isinstance(entry.fields.get("recovery"), Mapping)), {})
    split = {str(name): float(value) for name, value in told.items() if isinstance(value, int | float)} if isinstance(told, Mapping) else {}
    injected_s = _number(injected.fields.get("mono_s"))
    later = [mono_s for generation, mono_s in first_rows.items() if generation > injected.generation]
    if later and injected_s is not None and detected_s is not None:
        split["training_again_s"] = round(min(later) - injected_s - detected_s, 3)
    return split


def _part(record: Json, name: str) -> Json:
    part = record.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
