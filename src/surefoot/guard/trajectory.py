"""Which recorded steps a checkpoint must be able to repeat: pure functions over the ledger and the rows of the metrics store.

An attempt's rows count for a checkpoint when both went on from one state: the attempt passed through the checkpoint, or both descend from
the last checkpoint that they have in common. Rows of an attempt whose own replay differed do not count, nor rows past the point from which
somebody went back on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.core.events import Event
from surefoot.core.identity import STAGES
from surefoot.core.layouts import layout_facts
from surefoot.core.records import CheckpointRef, LedgerEntry
from surefoot.guard.environment import EXACT
from surefoot.guard.replay import Difference, Figures, Mode, Recorded

COLUMNS = ("step", "attempt", "loss", "grad_norm", "next_sample", "num_live_tokens")


@dataclass(frozen=True, slots=True)
class Facts:
    """What an attempt ran under: `surroundings` decide bits, `identity` (config, code, data) decides what is computed at all."""

    surroundings: Mapping[str, object]
    identity: Mapping[str, object]


def facts_of(fields: Mapping[str, Any]) -> Facts:
    """From what `attempt.started` and manifests say under the same names. Where sums are exact, the layout decides no bit.

    Stages are no part of it: `stage_changes` says from which sample on they differ.
    """
    environment = dict(fields.get("environment") or {})
    topology = layout_facts(told) if (told := fields.get("topology")) else {}
    if environment.get("sums") == EXACT:
        topology = {}
        environment.pop("world_size", None)
    hashes = {name: value for name, value in (fields.get("config_hashes") or {}).items() if name != STAGES}
    identity = {**hashes, "data_hash": fields.get("data_hash", "")}
    return Facts({**environment, **topology}, identity)


def repeats_bits(facts: Facts) -> bool:
    """Whether the same surroundings promise the same bits: an accelerator that was not told to be deterministic promises none."""
    return facts.surroundings.get("device", "cpu") == "cpu" or facts.surroundings.get("deterministic") is True


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    base: str | None
    step: int
    facts: Facts


@dataclass(frozen=True, slots=True)
class DataChange:
    """From `sample` on a step is not what it was for attempts before `attempt`: something is left out since, or a stage is another."""

    attempt: int
    sample: int


@dataclass(frozen=True, slots=True)
class History:
    """The attempts of a run, its commits, and what was decided about replays."""

    attempts: Mapping[int, Attempt]
    refs: Sequence[CheckpointRef]
    struck: frozenset[int]
    departures: Sequence[tuple[int, int]]
    unsteady: Sequence[int]
    differences: tuple[Difference, ...]


def fold_history(entries: Iterable[LedgerEntry], *, refs: Sequence[CheckpointRef]) -> History:
    """`differences` are those since a replay was last verified; `unsteady` are attempts on machines that did not repeat their own bits."""
    attempts: dict[int, Attempt] = {}
    struck: set[int] = set()
    rotated: set[int] = set()  # their sums were taken in another order: no record for anybody
    departures: list[tuple[int, int]] = []
    unsteady: list[int] = []
    differences: list[Difference] = []
    for entry in entries:
        fields = entry.fields
        if entry.event == Event.ATTEMPT_STARTED:
            attempts[entry.attempt] = _attempt(entry)
            if fields.get("asked_by"):
                departures.append((entry.attempt, entry.step))
        elif entry.event == Event.RUN_ROLLED_BACK:
            trusted = fields.get("trusted_until")  # what was recorded up to there is well, and can be compared with
            departures.append((entry.attempt, trusted if isinstance(trusted, int) else entry.step))
            if fields.get("phase") == "rotated" and attempts[entry.attempt].facts.surroundings.get("sums") != EXACT:
                rotated.add(entry.attempt)
        elif entry.event == Event.REPLAY_DIFFERED:
            struck.add(entry.attempt)
            differences.append(difference_of(entry))
        elif entry.event == Event.REPLAY_VERIFIED:
            struck.discard(entry.attempt)
            outvoted = fields.get("outvoted")
            if isinstance(outvoted, int):
                struck.add(outvoted)
            if entry.rule == "not-reproduced":
                unsteady.append(entry.attempt)
            differences = []
    return History(attempts, refs, frozenset(struck | rotated), departures, unsteady, tuple(differences))


def recorded_after(
    checkpoint: CheckpointRef,
    *,
    history: History,
    rows: Iterable[Mapping[str, Any]],
    now: Facts,
    max_steps: int,
    changes: Sequence[DataChange] = (),
) -> tuple[Recorded, ...]:
    """The steps after `checkpoint` that were recorded without a gap, at most `max_steps`: of each the best to compare with.

    Steps that held samples which `changes` took away, or changed, are none; nor is what was trained on top of them. Best is what may be
    asked for the most, and of those the oldest: a younger attempt may have been killed before its own replay was over.
    """
    descent = _Descent(history.refs)
    modes = {number: _mode(attempt, checkpoint, history, now, descent) for number, attempt in history.attempts.items()}
    found: dict[int, Recorded] = {}
    for row in rows:
        step, attempt = int(row["step"]), int(row["attempt"])
        mode = modes.get(attempt)
        if mode is None or any(attempt < later and step > back_at for later, back_at in history.departures):
            continue
        made = Recorded(Figures(**{name: row[name] for name in COLUMNS if name != "attempt"}), attempt, mode)
        if not saw_the_same(made, changes):
            continue
        if step not in found or _rank(made) < _rank(found[step]):
            found[step] = made
    following: list[Recorded] = []
    while len(following) < max_steps and (recorded := found.get(checkpoint.step + len(following) + 1)):
        if following and recorded.mode == Mode.SHOWN != following[0].mode:
            break  # what follows was computed under another config: no part of what can be verified
        following.append(recorded)
    return tuple(following)


def stage_changes(entries: Iterable[LedgerEntry]) -> tuple[DataChange, ...]:
    """What starts changed about stages: it holds for the attempts after the one that was the last then.

    A step that ended at the edge of a stage may have been cut short there, so the sample before the edge is counted in.
    """
    changed = [(entry.attempt, entry.fields.get("effective_sample")) for entry in entries if entry.event == Event.STAGE_CHANGED]
    return tuple(DataChange(attempt + 1, (sample if isinstance(sample, int) else 0) - 1) for attempt, sample in changed)


def saw_the_same(recorded: Recorded, changes: Iterable[DataChange]) -> bool:
    """Whether a repetition of this step, and of all before it, sees the data that it saw.

    What the attempt took itself holds from behind the step that was its last one then; what was taken before, it knew.
    """
    return not any(change.attempt > recorded.attempt and change.sample < recorded.figures.next_sample for change in changes)


def difference_of(entry: LedgerEntry) -> Difference:
    """From its ledger entry; what `difference_fields` wrote."""
    fields = entry.fields
    relative = fields.get("relative")
    return Difference(
        checkpoint=str(fields.get("checkpoint", "")),
        step=entry.step,
        what=str(fields.get("what", "")),
        reason=entry.reason,
        within=bool(fields.get("within")),
        relative=float(relative) if isinstance(relative, int | float) else float("inf"),
        seen=str(fields.get("seen", "")),
    )


def difference_fields(difference: Difference) -> dict[str, object]:
    """For the ledger, which keeps the step and the reason itself."""
    return {
        "checkpoint": difference.checkpoint,
        "what": difference.what,
        "within": difference.within,
        "relative": difference.relative,
        "seen": difference.seen,
    }


def _attempt(entry: LedgerEntry) -> Attempt:
    base = entry.fields.get("checkpoint")
    return Attempt(entry.attempt, base if isinstance(base, str) else None, entry.step, facts_of(entry.fields))


def _rank(recorded: Recorded) -> tuple[int, int]:
    return list(Mode).index(recorded.mode), recorded.attempt


class _Descent:
    """Which checkpoint came from which, looked up by name: a long run has thousands of them, and hundreds of attempts."""

    def __init__(self, refs: Sequence[CheckpointRef]) -> None:
        self.by_id = {ref.id: ref for ref in refs}
        self.made_by: dict[int, list[str]] = {}
        for ref in refs:
            self.made_by.setdefault(ref.attempt, []).append(ref.id)

    def chain(self, checkpoint: str | None) -> list[str]:
        """From the first known ancestor to `checkpoint`, by parents."""
        chain: dict[str, None] = {}
        while checkpoint is not None and checkpoint not in chain:
            chain[checkpoint] = None
            checkpoint = self.by_id[checkpoint].parent if checkpoint in self.by_id else None
        return list(chain)[::-1]

    def began_fresh(self, chain: Sequence[str]) -> bool:
        """Whether its first checkpoint was made by an attempt that started at step 0 here: an import was made by none."""
        first = self.by_id.get(chain[0]) if chain else None
        return not chain or (first is not None and first.parent is None and first.attempt > 0)


def _mode(attempt: Attempt, checkpoint: CheckpointRef, history: History, now: Facts, descent: _Descent) -> Mode | None:
    """What may be asked of this attempt's rows after `checkpoint`; None where they say nothing about it."""
    if attempt.number in history.struck:
        return None
    line = descent.chain(checkpoint.id)
    passed = [*descent.chain(attempt.base), *descent.made_by.get(attempt.number, ())]
    path = {name: index for index, name in enumerate(dict.fromkeys(passed))}
    common = next((index for index in range(len(line) - 1, -1, -1) if line[index] in path), None)
    if common is None:
        if not (descent.began_fresh(line) and descent.began_fresh(list(path))):
            return None
        apart = {*line, *path}
    else:
        apart = {*line[common + 1 :], *list(path)[path[line[common]] + 1 :]}
    involved = {attempt.number, *(descent.by_id[name].attempt for name in apart if name in descent.by_id)}
    ran_under = [history.attempts[number].facts for number in involved if number in history.attempts]
    if len(ran_under) < len(involved) or any(facts.identity != now.identity for facts in ran_under):
        return Mode.SHOWN
    if any(facts.surroundings != now.surroundings for facts in ran_under):
        return Mode.TOLERANCE
    steady = repeats_bits(now) and all(
        history.attempts[number].facts.surroundings != now.surroundings for number in history.unsteady if number in history.attempts
    )
    return Mode.BITS if steady else Mode.TOLERANCE
