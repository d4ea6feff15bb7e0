"""What became of a fault, read from the ledger alone: caught when and by what, named what, and what was done."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from tests.ranks.injections.drawing import Case

_SEEN = (Event.ANOMALY_FOUND, Event.STEP_RECHECKED, Event.REPLAY_DIFFERED)
ADVICE = "cusum"
SAME_BITS, WITHIN, WORSE = "the same bits", "within the spread", "WORSE"
_DONE = {
    Event.UPDATE_SKIPPED: "skip",
    Event.RUN_ROLLED_BACK: "roll back",
    Event.RUN_HALTED: "halt",
    Event.RUN_PAUSED: "pause",
    Event.CHECKPOINT_REJECTED: "older checkpoint",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`delay_steps` from the fault to the first word of it, None where nobody noticed. `cause` and `ranks` are those of the last word."""

    case: Case
    rule: str = ""
    delay_steps: int | None = None
    cause: str = ""
    ranks: tuple[int, ...] = ()
    actions: tuple[str, ...] = ()
    exit_code: int = 0
    healed: str = ""

    @property
    def is_within_spread(self) -> bool:
        return self.healed.startswith(WITHIN)

    @property
    def is_caught(self) -> bool:
        return self.delay_steps is not None

    @property
    def is_inconclusive(self) -> bool:
        return self.cause in ("", "inconclusive")

    @property
    def is_named_rightly(self) -> bool:
        return self.cause == self.case.cause and (not self.case.ranks or self.ranks == self.case.ranks)

    def line(self) -> str:
        fault = self.case.fault
        where = f"rank {fault.rank}" if fault.rank >= 0 else ", ".join(f"rank {rank}" for rank in self.case.ranks) or "all ranks"
        caught = f"{self.rule} after {self.delay_steps}" if self.is_caught else "not noticed"
        named = f"{self.cause or 'nothing'}{f' {list(self.ranks)}' if self.ranks else ''}"
        right = "right" if self.is_named_rightly else "inconclusive" if self.is_inconclusive else "WRONG"
        done = ", ".join(self.actions) or "nothing"
        return (
            f"{fault.kind:22} seed {self.case.seed:3}  step {fault.step:3}  {where:9}  {caught:32}  {named:20} {right:12}  "
            f"{done:34} exit {self.exit_code}  {self.healed}"
        )


def outcome_of(case: Case, entries: Sequence[LedgerEntry], *, exit_code: int, until_step: int | None = None) -> Outcome:
    """From the first word about a step of [fault, until_step) on, up to the next one about a step behind it: several can share a run."""
    first, last = case.first_step, until_step or 1 << 30
    seen = [index for index, entry in enumerate(entries) if _speaks(entry) and first <= _step_of(entry) < last]
    if not seen:
        return Outcome(case, exit_code=exit_code)
    behind = (index for index, entry in enumerate(entries) if index > seen[0] and _speaks(entry) and _step_of(entry) >= last)
    of_fault = entries[seen[0] : next(behind, len(entries))]
    cause, ranks = _named(of_fault)
    return Outcome(
        case,
        rule=of_fault[0].rule or of_fault[0].event,
        delay_steps=_step_of(of_fault[0]) - first,
        cause=cause,
        ranks=ranks,
        actions=_actions(of_fault),
        exit_code=exit_code,
    )


def _speaks(entry: LedgerEntry) -> bool:
    """Advice apart: it is no alarm."""
    return entry.event in _SEEN and not entry.rule.startswith(ADVICE)


def refused(case: Case, error: str, *, exit_code: int) -> Outcome:
    """Of a run that did not begin."""
    named = re.findall(r"rank (\d+) has", error)
    cause = "config" if "run.seed" in error else ""
    return Outcome(
        case, "refused", 0 if exit_code else None, cause, tuple(map(int, named[:1])), ("no start",) if exit_code else (), exit_code
    )


def table(outcomes: Iterable[Outcome]) -> str:
    return "\n".join(outcome.line() for outcome in outcomes)


def _step_of(entry: LedgerEntry) -> int:
    """The training step that it is about; what happens after a step has its number already, what is found in one has not."""
    told = entry.fields.get("of_step")
    return int(told) if isinstance(told, int) else entry.step


def _named(entries: Sequence[LedgerEntry]) -> tuple[str, tuple[int, ...]]:
    """By the gravest that spoke: an episode, a repetition, a replay, a finding."""
    for event in (Event.EPISODE_DIAGNOSED, Event.STEP_RECHECKED):
        told = [entry.fields for entry in entries if entry.event == event]
        if told:
            return str(told[-1]["cause"]), _ranks(told[-1])
    if any(entry.event == Event.REPLAY_DIFFERED for entry in entries):
        return "state", ()
    for entry in entries:
        evidence = entry.fields.get("evidence")
        if entry.event == Event.ANOMALY_FOUND and isinstance(evidence, Mapping):
            return str(evidence.get("cause") or entry.fields.get("cause") or ""), _ranks(evidence)
    return "", ()


def _ranks(fields: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in fields.get("ranks") or ())


def _actions(entries: Sequence[LedgerEntry]) -> tuple[str, ...]:
    """Each once, in the order in which it was first taken, and how often."""
    done = [_DONE[Event(entry.event)] for entry in entries if entry.event in _DONE]
    done += ["taken again" for entry in entries if entry.event == Event.STEP_RECHECKED and entry.fields.get("taken")]
    counts = {name: done.count(name) for name in dict.fromkeys(done)}
    return tuple(f"{name} x{count}" if count > 1 else name for name, count in counts.items())
