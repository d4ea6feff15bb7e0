"""What is wrong with a run, whom to suspect, and what to type next: from what its ledger says, joined with what others found. Pure.

The order of the checks is data, code, cluster: bad documents are the commonest cause of a spike and the cheapest to rule out, a broken
machine is the rarest and the dearest. A check that nobody has made is unknown, and never counts as a good sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from surefoot.core.events import Event
from surefoot.core.records import Asks, LedgerEntry
from surefoot.heal.alert_kinds import CORRUPTION_RULES, ranks_of

_Ill = Literal["spike", "nan", "occasional-nan", "divergence", "ill-weights", "plateau", "rebound", "canary"]
_Wrong = Literal["ledger-cut", "ranks-differ", "corruption", "unrepeatable", "schedule"]
Name = Literal[_Ill, _Wrong, "asked"]
Suspect = Literal["data", "code", "cluster", "state", "unknown"]
Outcome = Literal["ok", "found", "unknown"]

FEW: Final = 3
"""So many steps that are not finite, close together, are no accident any more: the breaker's own number."""
_CLOSE_STEPS: Final = 200  # findings of one kind within so many steps are one symptom: what a spike takes to recover
_OF_RULE: Final[Mapping[str, Name]] = {
    "nonfinite": "nan",
    "nonfinite_gradient": "nan",  # by these names in ledgers of earlier releases
    "nonfinite_loss": "nan",
    "plateau": "plateau",
    "rebound": "rebound",
    "diverged": "divergence",
    "state_is_ill": "ill-weights",
    "rank_is_wrong": "corruption",
    "bits_do_not_repeat": "unrepeatable",
    "rank_norm": "ranks-differ",
    "rank_loss": "ranks-differ",
    "ranks_differ": "ranks-differ",
    "replica_norm_compare": "ranks-differ",
    "lr_jump": "schedule",
    "lr_not_applied": "schedule",
    "canary_rise": "canary",
    "canary_apart": "canary",
    "canary_2sigma_500": "canary",
}
_GRAVITY: Final = (
    *("ledger-cut", "corruption", "nan", "divergence", "ill-weights", "schedule", "canary", "rebound", "spike"),
    *("ranks-differ", "occasional-nan"),
    *("unrepeatable", "plateau", "asked"),
)
SUSPECT_OF_CAUSE: Final[Mapping[str, Suspect]] = {"data": "data", "state": "state", "hardware": "cluster", "schedule": "code"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `of` is whom it speaks against when something is `found`."""

    name: str
    outcome: Outcome
    detail: str
    of: Suspect = "unknown"

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "outcome": self.outcome, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Signs:
    """Ledger entries about one symptom, oldest first, from the step at which it began to the last one that is held against the run."""

    name: Name
    onset_step: int
    last_step: int
    entries: tuple[LedgerEntry, ...] = ()

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rule_of(entry) for entry in self.entries))

    @property
    def gravest(self) -> LedgerEntry | None:
        """The finding that asks for most, the first of equals."""
        asks = [*map(str, Asks)]

        def grade(entry: LedgerEntry) -> int:
            told = str(entry.fields.get("asks", ""))
            return asks.index(told) if told in asks else 0

        return max(self.entries, key=grade, default=None)

    @property
    def gravest_step(self) -> int:
        """Where the gravest finding began: the step whose documents are looked at."""
        return _onset(self.gravest) if self.gravest is not None else self.onset_step

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for entry in self.entries for rank in ranks_of(entry)}))


@dataclass(frozen=True, slots=True)
class Symptom:
    """`evidence` is JSON; `documents` are those that stand out, most first; `action` is one command."""

    name: Name
    onset_step: int
    suspect: Suspect
    checks: tuple[Check, ...]
    evidence: Mapping[str, Any]
    action: str
    documents: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "onset_step": self.onset_step,
            "suspect": self.suspect,
            "reason": self.reason,
            "checks": [check.as_json() for check in self.checks],
            "evidence": dict(self.evidence),
            "documents": [dict(document) for document in self.documents],
            "action": self.action,
        }


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """What replays found out by themselves: the cause of an episode, or of one step that was computed again."""

    cause: str
    reason: str
    first_step: int
    last_step: int
    ranks: tuple[int, ...] = ()
    samples: tuple[int, int] | None = None
    episode: str = ""
    is_transient: bool = False

    @property
    def accused(self) -> tuple[int, ...]:
        """Ranks that compute wrongly each time, though repetition cannot tell which of them: two always stand apart from each other."""
        return self.ranks if self.cause == "inconclusive" and not self.is_transient else ()


@dataclass(frozen=True, slots=True)
class Healed:
    """An episode that is closed, the steps that it was about, and the ledger entry that closed it."""

    episode: str
    first_step: int
    last_step: int
    closed_seq: int


@dataclass(frozen=True, slots=True)
class Told:
    """The ledger as triage reads it: `signs` of symptoms, and what was diagnosed already."""

    signs: tuple[Signs, ...] = ()
    diagnosed: tuple[Diagnosed, ...] = field(default=())
    healed: tuple[Healed, ...] = ()

    def about(self, signs: Signs) -> Diagnosed | None:
        """The newest diagnosis of steps that overlap; inconclusive ones only where there is no other."""
        near = [one for one in self.diagnosed if one.first_step <= signs.last_step and one.last_step >= signs.onset_step]
        return next((one for one in reversed(near) if one.cause in SUSPECT_OF_CAUSE), near[-1] if near else None)

    def healed_by(self, signs: Signs) -> Healed | None:
        """The closed episode of these steps that nothing was found after."""
        newest = max((entry.seq for entry in signs.entries), default=0)
        near = [one for one in self.healed if one.first_step <= signs.last_step and one.last_step >= signs.onset_step]
        return next((one for one in reversed(near) if one.closed_seq > newest), None)


def rule_of(entry: LedgerEntry) -> str:
    return str(entry.fields.get("rule") or entry.rule)


def step_of(entry: LedgerEntry) -> int:
    """The step that an entry is about: a finding is written before its step is finished."""
    of_step = entry.fields.get("of_step")
    return of_step if isinstance(of_step, int) else entry.step


def read_signs(entries: Iterable[LedgerEntry], *, step: int | None = None) -> Told:
    """What `entries` tell of symptoms, the gravest first; with `step` those about it, or one that only says that somebody asked."""
    open_signs: dict[Name, Signs] = {}
    done: list[Signs] = []
    diagnosed: list[Diagnosed] = []
    entries = tuple(entries)
    nonfinite = {(entry.attempt, step_of(entry)) for entry in entries if _name(entry) == "nan"}
    for entry in entries:
        if (found := _diagnosis(entry)) is not None:
            diagnosed.append(found)
        name = _name(entry)
        if name is None:
            continue
        if name == "spike" and (entry.attempt, step_of(entry)) in nonfinite:
            name = "nan"  # of the same step: what is not finite is an outlier to every rule
        onset = _onset(entry)
        held = open_signs.get(name)
        if held is not None and onset - held.last_step > _CLOSE_STEPS:
            done.append(held)
            held = None
        open_signs[name] = _joined(held, entry, name, onset)
    signs = [_renamed(one) for one in (*done, *open_signs.values())]
    if step is not None:
        signs = [one for one in signs if one.onset_step - 1 <= step <= one.last_step] or [Signs("asked", step, step)]
    signs.sort(key=lambda one: (_GRAVITY.index(one.name), -one.onset_step))
    return Told(tuple(signs), tuple(diagnosed), tuple(_healed(entries)))


def _healed(entries: Sequence[LedgerEntry]) -> list[Healed]:
    opened: dict[str, LedgerEntry] = {}
    healed = []
    for entry in entries:
        if entry.event == Event.EPISODE_OPENED:
            opened[f"e{entry.seq}"] = entry
        began = opened.get(str(entry.fields.get("episode"))) if entry.event == Event.EPISODE_CLOSED else None
        if began is not None:
            detected = began.fields.get("detected_step")
            last = detected if isinstance(detected, int) else began.step
            healed.append(Healed(f"e{began.seq}", _onset(began), last, entry.seq))
    return healed


def _joined(held: Signs | None, entry: LedgerEntry, name: Name, onset: int) -> Signs:
    last = max(onset, step_of(entry))
    if held is None:
        return Signs(name, onset, last, (entry,))
    return replace(held, onset_step=min(held.onset_step, onset), last_step=max(held.last_step, last), entries=(*held.entries, entry))


def _renamed(signs: Signs) -> Signs:
    steps = {step_of(entry) for entry in signs.entries}
    return replace(signs, name="occasional-nan") if signs.name == "nan" and len(steps) < FEW else signs


def _name(entry: LedgerEntry) -> Name | None:
    rule = rule_of(entry)
    if entry.event == Event.REPLAY_DIFFERED:
        return "corruption"
    if entry.event == Event.UPDATE_SKIPPED:  # ledgers of earlier releases have no findings
        return _OF_RULE.get(rule) if rule.startswith("nonfinite") else None
    if entry.event != Event.ANOMALY_FOUND or rule.startswith("cusum"):
        return None
    return "corruption" if rule in CORRUPTION_RULES else _OF_RULE.get(rule, "spike")


def _onset(entry: LedgerEntry) -> int:
    onset = entry.fields.get("onset_step")
    return onset if isinstance(onset, int) else step_of(entry)


def _diagnosis(entry: LedgerEntry) -> Diagnosed | None:
    cause = entry.fields.get("cause")
    if not isinstance(cause, str):
        return None
    is_transient = bool(entry.fields.get("transient"))
    if entry.event == Event.STEP_RECHECKED:
        return Diagnosed(cause, entry.reason, step_of(entry), step_of(entry), ranks_of(entry), is_transient=is_transient)
    if entry.event != Event.EPISODE_DIAGNOSED:
        return None
    first, last = _pair(entry.fields.get("steps")) or (entry.step, entry.step)
    samples = _pair(entry.fields.get("samples"))
    return Diagnosed(cause, entry.reason, first, last, ranks_of(entry), samples, str(entry.fields.get("episode", "")), is_transient)


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(number, int) for number in value):
        return int(value[0]), int(value[1])
    return None
