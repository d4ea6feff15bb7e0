"""A person's wish to go on from a named checkpoint. It stands in the ledger, so it survives a crash, and it holds for one start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry


@dataclass(frozen=True, slots=True)
class Wish:
    """`insisted`: go on from it whatever its replay says. `by` is the user's name."""

    checkpoint: str
    by: str
    insisted: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def open_wish(entries: Iterable[LedgerEntry]) -> Wish | None:
    """The last wish that no start has met yet: neither did an attempt begin from it, nor was it found not to load."""
    wish: Wish | None = None
    for entry in entries:
        if entry.event == Event.RESUME_ASKED:
            wish = Wish(str(entry.fields.get("id", "")), entry.by, bool(entry.fields.get("insisted")))
        elif wish is not None and (
            entry.event == Event.ATTEMPT_STARTED or (entry.event == Event.CHECKPOINT_REJECTED and entry.fields.get("id") == wish.checkpoint)
        ):
            wish = None
    return wish
