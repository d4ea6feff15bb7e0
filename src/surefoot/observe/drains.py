"""Drains that people asked for and the run took: read off the ledger by the agent that hands them on to the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from surefoot.core.clock import Clock
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import LEDGER_NAME
from surefoot.observe.ledger_tail import LedgerTail

MAX_NODE_NAME: Final = 253
"""Characters of a host's full name."""


@dataclass(frozen=True, slots=True)
class DrainTaken:
    """`node`: its id or name, as the person gave it. `order` is the id of the order."""

    node: str
    by: str
    reason: str
    order: str
    generation: int


def drain_of(entry: LedgerEntry) -> DrainTaken | None:
    """None when the entry takes no drain."""
    fields = entry.fields
    if entry.event != Event.ORDER_TAKEN or fields.get("verb") != "drain":
        return None
    return DrainTaken(str(fields.get("node", "")), str(fields.get("by", "")), entry.reason, str(fields.get("id", "")), entry.generation)


def num_nodes_of(entries: Sequence[LedgerEntry]) -> int:
    """Nodes of the newest generation; 1 where nothing is said of several."""
    newest = next((entry for entry in reversed(entries) if entry.event == Event.GENERATION_STARTED), None)
    told = newest.fields.get("num_nodes") if newest is not None else None
    return told if isinstance(told, int) and told > 0 else 1


def why_no_drain(entries: Sequence[LedgerEntry]) -> str | None:
    """Why no node of this run can be drained; None when one can."""
    if num_nodes_of(entries) > 1:
        return None
    return "the run is on one node: without it nothing would be left; `surefoot stop` saves and ends it, and it goes on where you start it"


class DrainTail:
    """The drains taken since this was made, each once. Cheap: it asks the ledger for its size at most every `look_every_s`."""

    def __init__(self, run_dir: Path, *, clock: Clock, look_every_s: float = 0.5) -> None:
        self._tail = LedgerTail(run_dir / LEDGER_NAME, events=(Event.ORDER_TAKEN,), clock=clock, look_every_s=look_every_s)
        self._tail.news(now=True)  # those of an earlier agent were handed on, or its job is over

    def news(self) -> list[DrainTaken]:
        """Raises OSError when the ledger cannot be read; the next call begins where this one did."""
        return [drain for entry in self._tail.news() if (drain := drain_of(entry)) is not None]
