"""An episode: a roll-back that is looked into, until its cause has a name. Pure, and folded from the ledger, so that nothing rolls it back.

replay    the same batches on the same ranks from before the onset. What does not recur was the state (or a transient fault).
rotated   the same batches, each on the next rank. What does not recur then belongs to a rank.
skipped   without the samples from onset to detection: they were to blame.

What recurs in each of them, or has a cause that no batch explains, is for a person.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import HealSection
from surefoot.heal.diagnosis import KNOWN_CAUSES, Cause, Diagnosis

Phase = Literal["replay", "rotated", "skipped"]

_GRACE_STEPS = 20
"""Steps behind the one at which it was found that a recurrence may come late: a replay that was cut otherwise, a window a little fuller."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Steps `onset_step` to `detected_step` are held against the run, and the samples [first, end) of these steps.

    `ranks` are those that the finding named; it goes back to the newest checkpoint of at most `to_step`,
    with learning rates times `lr_factor` from there on. `id` is `e<seq>` of the entry that opened it.
    """

    id: str
    rule: str
    reason: str
    onset_step: int
    detected_step: int
    samples: tuple[int, int]
    phase: Phase
    ranks: tuple[int, ...] = ()
    to_step: int = 0
    lr_factor: float = 1.0

    @property
    def rotation(self) -> int:
        return 1 if self.phase == "rotated" else 0

    @property
    def last_step(self) -> int:
        """After it nothing of this kind may come any more, in a run that is longer."""
        return self.detected_step + _GRACE_STEPS

    @property
    def known_cause(self) -> Cause | None:
        """Of the first of its rules whose cause needs no replay."""
        return next((KNOWN_CAUSES[rule] for rule in self.rule.split(", ") if rule in KNOWN_CAUSES), None)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "samples": list(self.samples), "ranks": list(self.ranks)}


def episode_from_json(value: Mapping[str, Any]) -> Episode:
    first, end = value["samples"]
    return Episode(**{**value, "samples": (int(first), int(end)), "ranks": tuple(value.get("ranks", ()))})


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to say yet."""


@dataclass(frozen=True, slots=True)
class Again:
    """Go back once more, in another phase."""

    phase: Phase
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """The run is well again, and the cause has a name."""

    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A person must look; `diagnosis` is what is known."""

    diagnosis: Diagnosis


Verdict = Wait | Again | Close | GiveUp


@dataclass(frozen=True, slots=True)
class Means:
    """What the loop can be asked for, and how long it is: whether atoms can move on by a rank, and samples be left out."""

    can_rotate: bool
    can_skip: bool
    num_steps: int


def follow(episode: Episode, *, step: int, again: str, means: Means, rotated_says: Diagnosis | None = None) -> Verdict:
    """What a judged step means for the episode. `again`: the rule that asks for a roll-back, or a pause, now; empty for none.

    `rotated_says` is what the figures by rank say, where the phase is `rotated` and both are known.
    """
    if step < episode.onset_step:
        return Wait()
    if again:
        return _recurred(episode, f"{again} at step {step}", means)
    if step < min(episode.last_step, means.num_steps):
        return Wait()
    return _vanished(episode, rotated_says)


def _recurred(episode: Episode, again: str, means: Means) -> Verdict:
    known = episode.known_cause
    if known is not None:
        return GiveUp(Diagnosis(known, f"{again} of a replay, and no batch explains it", episode.ranks))
    if episode.phase == "replay" and means.can_rotate:
        return Again("rotated", f"{again} with the same batches on the same ranks")
    if episode.phase == "skipped":
        return GiveUp(Diagnosis("inconclusive", f"{again} although its samples were left out"))
    reason = f"{again} with the same batches{' on other ranks' if episode.phase == 'rotated' else ''}: the data is to blame"
    if not means.can_skip:
        return GiveUp(Diagnosis("data", f"{reason}, and the data port of this loop leaves nothing out"))
    return Again("skipped", reason)


def _vanished(episode: Episode, rotated_says: Diagnosis | None) -> Verdict:
    if episode.phase == "rotated":
        gone = "it came back on the same ranks, and not when every batch moved on by one"
        return GiveUp(rotated_says or Diagnosis("inconclusive", f"{gone}; the figures by rank name none of them"))
    if episode.phase == "skipped":
        return Close(Diagnosis("data", "it came back with its samples, and is gone without them"))
    if episode.known_cause is not None:
        return Close(Diagnosis(episode.known_cause, "it is gone in the replay: a fault that is over", episode.ranks, is_transient=True))
    return Close(Diagnosis("state", "the same batches on the same ranks are well from an older state", is_transient=True))


@dataclass(frozen=True, slots=True)
class Episodes:
    """What the ledger says. `is_back`: the open one has gone back in its phase. The budget is counted from `opened_at`, the steps at which
    episodes were opened. `closed_rules` were rolled back for, with an end; `lr_factor` is what the last roll-back made of the learning
    rate.
    """

    open: Episode | None = None
    is_back: bool = False
    opened_at: tuple[int, ...] = ()
    closed_rules: tuple[str, ...] = ()
    lr_factor: float = 1.0

    def num_rollbacks(self, *, step: int, section: HealSection) -> int:
        """Of the last `heal.budget_steps`; a step can come again, so those ahead count too."""
        return sum(1 for opened in self.opened_at if opened > step - section.budget_steps)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "open": self.open.as_json() if self.open is not None else None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Episodes:
        opened = episode_from_json(value["open"]) if value["open"] is not None else None
        return cls(opened, bool(value["is_back"]), tuple(value["opened_at"]), tuple(value["closed_rules"]), float(value["lr_factor"]))


def fold_episodes(entries: Iterable[LedgerEntry]) -> Episodes:
    """What was opened and not closed. A person who releases the run has looked: that ends the open one, and gives the budget back."""
    found = Episodes()
    for entry in entries:
        if entry.event == Event.EPISODE_OPENED:
            opened = episode_from_json({**entry.fields, "id": f"e{entry.seq}"})
            found = replace(found, open=opened, is_back=False, opened_at=(*found.opened_at, entry.step))
        elif entry.event == Event.RUN_ROLLED_BACK:
            found = _rolled_back(found, entry.fields)
        elif entry.event == Event.BLOCK_ASKED and found.open is not None and entry.fields.get("episode") == found.open.id:
            found = replace(found, open=replace(found.open, phase="skipped"), is_back=False)
        elif entry.event == Event.EPISODE_CLOSED:
            closed = (found.open.rule,) if found.open is not None else ()
            found = replace(found, open=None, closed_rules=(*found.closed_rules, *closed))
        elif entry.event == Event.RUN_RELEASED:
            found = Episodes(lr_factor=found.lr_factor)
    return found


def _rolled_back(found: Episodes, fields: Mapping[str, object]) -> Episodes:
    factor = fields.get("lr_factor")
    found = replace(found, lr_factor=float(factor) if isinstance(factor, int | float) else found.lr_factor)
    if found.open is None or fields.get("episode") != found.open.id:
        return found
    return replace(found, is_back=True, open=replace(found.open, phase=_phase(fields.get("phase"), found.open.phase)))


def _phase(told: object, present: Phase) -> Phase:
    return next((phase for phase in get_args(Phase) if phase == told), present)
