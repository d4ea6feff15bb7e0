"""Which nodes a run took out of service, and when: folded from its ledger, so that caps hold over restarts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry


@dataclass(frozen=True, slots=True)
class PastIsolation:
    node: str
    age_s: float
    is_out: bool


def past_isolations(entries: Iterable[LedgerEntry], *, now_utc: str) -> list[PastIsolation]:
    """One per node, its newest; `is_out` until it was readmitted. Those of the future, by a clock that went back, are new."""
    since: dict[str, str] = {}
    back: set[str] = set()
    for entry in entries:
        node = str(entry.fields.get("node", ""))
        if entry.event == Event.NODE_ISOLATED:
            since[node] = entry.time_utc
            back.discard(node)
        elif entry.event == Event.NODE_READMITTED:
            back.add(node)
    now = datetime.fromisoformat(now_utc)
    ages = {node: max(0.0, (now - datetime.fromisoformat(utc)).total_seconds()) for node, utc in since.items()}
    return [PastIsolation(node, age_s, node not in back) for node, age_s in ages.items()]
