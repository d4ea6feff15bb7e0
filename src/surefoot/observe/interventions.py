"""What was done to a run on its present line: which attempt computed which step, and what was skipped, left out or changed on the way.

Pure functions over ledger entries. An attempt that went on from a checkpoint has the steps after it, up to where a later one left it; what
was computed and then given up is on no line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, LedgerEntry
from surefoot.observe.lineage import Lineage

Kind = Literal["skip", "block", "rollback", "rate", "none"]

_BEGINNINGS = (Event.ATTEMPT_STARTED, Event.RUN_RESUMED, Event.RUN_ROLLED_BACK)


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps `first_step` to `last_step` (None: as far as the run has come) were computed by `attempt`, under the `facts` that its start
    ledgered. `rotation`: by how many ranks its atoms had moved on. `rates` are the entries (seq, factor) that had changed the learning rate
    by then: the last one holds."""

    attempt: int
    first_step: int
    last_step: int | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    rotation: int = 0
    rates: tuple[tuple[int, float], ...] = ()

    def holds(self, step: int) -> bool:
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)


@dataclass(frozen=True, slots=True)
class Intervention:
    """One entry of the ledger that made the line what it is. `step` is the first one that it may change.

    Kinds: `skip` (an update), `block` (something left out of the data), `rollback` (a line was left: what comes after it is another
    attempt's), `rate` (a roll-back after which learning rates are multiplied by something), `none` (it was looked at, and changes no bit).
    """

    seq: int
    kind: Kind
    step: int
    attempt: int
    event: str
    rule: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class _Start:
    base: str | None
    step: int
    facts: Mapping[str, Any]
    rotation: int = 0
    rates: tuple[tuple[int, float], ...] = ()


def segments_of(entries: Iterable[LedgerEntry], lineage: Lineage) -> tuple[Segment, ...]:
    """The present line, oldest first; empty before the first attempt. It begins with step 1 when the run began here, and later when it
    began at a checkpoint that was brought in, or when the ledger does not know what the first one came from.
    """
    starts = _starts(entries)
    if not starts:
        return ()
    segments: list[Segment] = []
    attempt, last_step = max(starts), None
    while (start := starts.pop(attempt, None)) is not None:
        base = lineage.ref(start.base) if start.base else None
        before = base.step if base is not None else start.step
        if last_step is None or before < last_step:
            segments.append(Segment(attempt, before + 1, last_step, start.facts, start.rotation, start.rates))
        if base is None:
            break
        attempt, last_step = base.attempt, base.step
    return tuple(reversed(segments))


def segment_at(segments: Sequence[Segment], step: int) -> Segment | None:
    return next((segment for segment in segments if segment.holds(step)), None)


def began_here(segments: Sequence[Segment]) -> bool:
    """Whether the line is known from its first step on, so that it can be computed again without any checkpoint."""
    return bool(segments) and segments[0].first_step == 1


def interventions_of(entries: Iterable[LedgerEntry], segments: Sequence[Segment]) -> tuple[Intervention, ...]:
    """Those of the line, in the order of the ledger. The log of what is left out goes on over every roll-back, so all of it counts."""
    found: list[Intervention] = []
    for entry in entries:
        segment = segment_at(segments, entry.step)
        on_line = segment is not None and segment.attempt == entry.attempt
        match entry.event:
            case Event.UPDATE_SKIPPED if on_line:
                found.append(_made(entry, "skip", entry.step))
            case Event.BLOCK_TAKEN:
                found.append(_made(entry, "block", entry.step + 1))
            case Event.RUN_ROLLED_BACK if any(part.attempt == entry.attempt for part in segments):
                found.append(_made(entry, "rollback" if _rate(entry) is None else "rate", entry.step + 1))
            case Event.STEP_RECHECKED if (part := segment_at(segments, entry.step + 1)) is not None and part.attempt == entry.attempt:
                found.append(_made(entry, "none", entry.step + 1))
    return tuple(found)


def usable_starts(lineage: Lineage, segments: Sequence[Segment], *, before_step: int) -> list[CheckpointRef]:
    """Checkpoints of the line from whose state step `before_step` can still be reached, the newest first; the damaged ones last.

    Suspect ones are among them: what is wrong in them is what the run went on with.
    """
    first = segments[0].first_step - 1 if segments else 0
    standing = [ref for name in lineage.line if name not in lineage.retired and (ref := lineage.ref(name)) is not None]
    fitting = [ref for ref in standing if first <= ref.step < before_step]
    return sorted(reversed(fitting), key=lambda ref: (ref.damaged, -ref.step))


def _starts(entries: Iterable[LedgerEntry]) -> dict[int, _Start]:
    """By attempt. What an attempt begins from is said up to twice; the facts are where it was started. An episode that is looked into with
    atoms on other ranks goes on so over a resume; the learning rate stays lowered over everything."""
    starts: dict[int, _Start] = {}
    rotation = 0
    rates: tuple[tuple[int, float], ...] = ()
    for entry in entries:
        if entry.event in (Event.EPISODE_CLOSED, Event.RUN_RELEASED) or (entry.event == Event.BLOCK_ASKED and "episode" in entry.fields):
            rotation = 0  # for the next attempt: the present one goes on as it began
        if entry.event not in _BEGINNINGS or "checkpoint" not in entry.fields:
            continue
        if entry.event == Event.RUN_ROLLED_BACK:
            rotation = 1 if entry.fields.get("phase") == "rotated" else 0
            rates = rates if (factor := _rate(entry)) is None else (*rates, (entry.seq, factor))
        base, before = entry.fields["checkpoint"], starts.get(entry.attempt)
        facts = entry.fields if entry.event == Event.ATTEMPT_STARTED else before.facts if before else {}
        starts[entry.attempt] = _Start(base if isinstance(base, str) else None, entry.step, facts, rotation, rates)
    return starts


def _rate(entry: LedgerEntry) -> float | None:
    """What a roll-back made of the learning rate; None where it left it."""
    factor = entry.fields.get("lr_factor")
    return float(factor) if isinstance(factor, int | float) else None


def _made(entry: LedgerEntry, kind: Kind, step: int) -> Intervention:
    return Intervention(entry.seq, kind, step, entry.attempt, entry.event, entry.rule, entry.reason, entry.by)
