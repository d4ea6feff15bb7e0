"""A person's wish to go on from a named checkpoint. It stands in the ledger, so it survives a crash, and it holds for one start.

A live run that takes the order to go back says so in one line, which is the wish too: killed before it is there, it starts from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median_low
from typing import Any

from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, LedgerEntry, Rung
from surefoot.observe.lineage import Lineage, candidates


@dataclass(frozen=True, slots=True)
class Wish:
    """`by` is the user's name."""

    checkpoint: str
    by: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def open_wish(entries: Iterable[LedgerEntry]) -> Wish | None:
    """The last wish that no start has met yet: neither did an attempt begin from it, nor was it found not to load."""
    wish: Wish | None = None
    order: object = None
    for entry in entries:
        if entry.event == Event.RESUME_ASKED:
            wish, order = Wish(str(entry.fields.get("id", "")), entry.by), None
        elif entry.event == Event.ORDER_TAKEN and entry.fields.get("verb") == "rollback":
            wish = Wish(str(entry.fields.get("checkpoint", "")), str(entry.fields.get("by", "")))
            order = entry.fields.get("id")
        elif wish is not None and (
            entry.event in (Event.ATTEMPT_STARTED, Event.RUN_ROLLED_BACK)
            or (entry.event == Event.CHECKPOINT_REJECTED and entry.fields.get("id") == wish.checkpoint)
            or (entry.event == Event.ORDER_REFUSED and order is not None and entry.fields.get("id") == order)
        ):
            wish = None
    return wish


def why_refuse(ref: CheckpointRef, lineage: Lineage) -> str | None:
    """Why nobody can go back to `ref`, whatever they confirm; None when it may load."""
    if not ref.damaged or lineage.tiers.get(ref.id):
        return None
    files = next((look.bad_files for look in reversed(lineage.looks.get(ref.id, ())) if not look.ok), ())
    where = f" ({', '.join(files[:3])})" if files else ""
    return f"{ref.id} is damaged{where}, and no other tier has a copy"


def why_confirm(ref: CheckpointRef, lineage: Lineage, *, asked_step: int | None = None) -> str | None:
    """Why going on from `ref` needs a second word from the person who asks for it; None when it does not.

    The mark to stay above is the newest proven checkpoint of the present line, or the newest loadable one where none is proven. Who names
    a step, and no checkpoint, may not know what that leads to: for `asked_step` the newest that is there is a mark too, and a way that is
    longer than the one between two saves is told.
    """
    is_import = ref.attempt == 0
    if ref.suspect:
        return f"{ref.id} is suspect: something wrong may have gone into it"
    if ref.abandoned and not is_import:
        return f"{ref.id} was given up: the present line does not descend from it"
    line = [found for name in lineage.line if (found := lineage.ref(name)) is not None and not found.suspect and not found.damaged]
    marks = [found for found in line if found.rung is Rung.PROVEN] or [found for found in line if found.rung is Rung.LOADABLE]
    if not marks and asked_step is not None:
        marks = [found for found in line if found.id not in lineage.retired | lineage.rejected]
    stand, mark = lineage.head, marks[-1] if marks else None
    num_steps = max([lineage.counters.step, *(found.step for found in (stand, mark) if found is not None)]) - ref.step
    if asked_step is not None and (before := asked_step - ref.step) > 0 and before > _usual_gap(lineage):
        what = f"no checkpoint of step {asked_step} is left, and {ref.id}, the newest good one before it, is {before} steps older"
        return f"{what}: {num_steps} steps would be given up"
    if mark is None:
        return None
    is_older = ref.step < mark.step if ref.abandoned else lineage.line.index(ref.id) < lineage.line.index(mark.id)
    if not is_older:
        return None
    standing = f", and the run stands at {stand.id}" if stand is not None and stand.id != mark.id else ""
    return f"{ref.id} is older than {mark.id}, the newest {mark.rung} one{standing}: {num_steps} steps would be given up"


def _usual_gap(lineage: Lineage) -> int:
    """The steps between two saves of the line, in the middle; those that were retired since count too."""
    steps = sorted({0, *(ref.step for name in lineage.line if (ref := lineage.ref(name)) is not None)})
    return median_low([after - before for before, after in pairwise(steps)] or [0])


def named_by_step(step: int, lineage: Lineage) -> CheckpointRef | None:
    """The checkpoint of a step that is still there: the last one on the present line, else the last one of a branch that was given up."""
    there = [ref for ref in lineage.refs if ref.step == step and ref.id not in lineage.retired]
    on_line = [ref for ref in there if not ref.abandoned]
    best = on_line or there
    return best[-1] if best else None


def standing_at(step: int, lineage: Lineage) -> CheckpointRef | None:
    """Where going back to `step` leads: to the checkpoint of that very step, or else to the newest good one of the line before it."""
    exact = named_by_step(step, lineage)
    if exact is not None:
        return exact
    good = [ref for ref in candidates(lineage) if ref.step <= step and not ref.damaged and ref.id not in lineage.rejected]
    return good[0] if good else None
