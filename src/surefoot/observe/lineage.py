"""What the ledger says about a run: which checkpoints its present trajectory stands on, and how often it was started.

Pure functions over ledger entries; nothing here looks at a folder. The *line* is the chain of commits that the present weights come from.
"Newest" is the last commit on the line, in the order of the ledger and never by step: after a roll-back the highest step belongs to the
branch that was given up, and a crash at that moment must not bring it back.

Conventions that all writers keep: `attempt.started`, `run.resumed` and `run.rolled_back` name the `checkpoint` that the weights now are
(null for fresh ones). `run.resumed` and `run.rolled_back` are written under the attempt that they begin, saves under the attempt
that made them. So a save that was still on its way when its branch was given up is known by its older attempt.

What others found when they looked at a checkpoint (`checkpoint.verified`, `.loaded`, `.proven`, `.damaged`) moves its rung and is kept
as a list of looks: who, where, when, with which verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, LedgerEntry, Manifest, Rung

_BRANCHES = (Event.ATTEMPT_STARTED, Event.RUN_RESUMED, Event.RUN_ROLLED_BACK)
_COMMITS = (Event.CHECKPOINT_COMMITTED, Event.CHECKPOINT_ADOPTED)
_LOOKS = (Event.CHECKPOINT_VERIFIED, Event.CHECKPOINT_DAMAGED, Event.CHECKPOINT_LOADED, Event.CHECKPOINT_PROVEN)
_ORDER = (Rung.WRITTEN, Rung.COMMITTED, Rung.LOADABLE, Rung.PROVEN)


@dataclass(frozen=True, slots=True)
class Look:
    """One look of somebody at all bytes of a checkpoint. `event` says how: read back, loaded, loaded by `world_size` ranks, or damaged."""

    event: str
    time_utc: str
    host: str
    by: str
    world_size: int = 0
    bad_files: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.event != Event.CHECKPOINT_DAMAGED


@dataclass(frozen=True, slots=True)
class Counters:
    """The counts that never go back. `num_restarts` counts every start of workers after the first, whoever ordered it."""

    generation: int = 0
    attempt: int = 0
    seq: int = 0
    step: int = 0
    num_generations: int = 0
    num_resumes: int = 0
    num_roll_backs: int = 0
    finished: bool = False

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_generations - 1)


@dataclass(frozen=True, slots=True)
class Lineage:
    """All commits in ledger order, and the ids of the line, oldest first.

    `base` is what the last resume started from when the ledger never saw it committed (an import). `branch_attempt` and `branch_seq` are
    those of the last resume or roll-back: a save from before it belongs to another branch unless the ledger already had it. `tiers` are
    the places beside this disk that have a copy; `branched_from` is what the ledger of a branch says about its parent.
    """

    counters: Counters = field(default_factory=Counters)
    refs: tuple[CheckpointRef, ...] = ()
    line: tuple[str, ...] = ()
    retired: frozenset[str] = frozenset()
    rejected: frozenset[str] = frozenset()
    base: str | None = None
    branch_attempt: int = 0
    branch_seq: int = 0
    looks: Mapping[str, tuple[Look, ...]] = field(default_factory=dict)
    tiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    branched_from: Mapping[str, object] | None = None
    _by_id: Mapping[str, CheckpointRef] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", {ref.id: ref for ref in self.refs})  # a run asks for each of its thousands, again and again

    def ref(self, checkpoint: str) -> CheckpointRef | None:
        return self._by_id.get(checkpoint)

    @property
    def head(self) -> CheckpointRef | None:
        """The last commit on the line, whether or not it may be resumed from: the next save's parent."""
        return self.ref(self.line[-1]) if self.line else None

    def newest(self) -> CheckpointRef | None:
        """What a restart restores unasked; None when there is nothing to restore."""
        return next(iter(candidates(self)), None)


def candidates(lineage: Lineage) -> list[CheckpointRef]:
    """What may be restored unasked, best first: down the line, without the suspect and the retired.

    Those that failed to restore before come behind, those whose bytes were found damaged last. They are not struck off: the cause may have
    been the machine and not the bytes, and another tier may have a copy.
    """
    standing = [ref for name in reversed(lineage.line) if name not in lineage.retired and (ref := lineage.ref(name)) is not None]
    usable = [ref for ref in standing if not ref.suspect]
    return sorted(usable, key=lambda ref: (ref.damaged, ref.id in lineage.rejected))


def fold_counters(entries: Iterable[LedgerEntry]) -> Counters:
    counters = Counters()
    for entry in entries:
        counters = _count(counters, entry)
    return counters


def _count(counters: Counters, entry: LedgerEntry) -> Counters:
    # A run is finished as long as no later attempt has begun.
    finished = (counters.finished and entry.attempt <= counters.attempt) or entry.event == Event.RUN_FINISHED
    return Counters(
        generation=max(counters.generation, entry.generation),
        attempt=max(counters.attempt, entry.attempt),
        seq=entry.seq,
        step=entry.step,
        num_generations=counters.num_generations + (entry.event == Event.GENERATION_STARTED),
        num_resumes=counters.num_resumes + (entry.event == Event.RUN_RESUMED),
        num_roll_backs=counters.num_roll_backs + (entry.event == Event.RUN_ROLLED_BACK),
        finished=finished,
    )


def fold_lineage(entries: Iterable[LedgerEntry]) -> Lineage:
    """The lineage after `entries`, oldest first."""
    fold = _Fold()
    counters = Counters()
    for entry in entries:
        counters = _count(counters, entry)
        fold.take(entry)
    return fold.result(counters)


class _Fold:
    """The lineage while it is being read: linear in the number of entries, where a chain of frozen copies would not be."""

    def __init__(self) -> None:
        self._refs: dict[str, CheckpointRef] = {}
        self._before: dict[str, str | None] = {}
        self._line: dict[str, None] = {}  # in order, and asked for membership with each commit
        self._struck: set[str] = set()
        self._retired: set[str] = set()
        self._rejected: set[str] = set()
        self._base: str | None = None
        self._branch = (0, 0)
        self._suspect_from: tuple[int, int] | None = None
        self._looks: dict[str, list[Look]] = {}
        self._tiers: dict[str, list[str]] = {}
        self._branched_from: Mapping[str, object] | None = None

    def take(self, entry: LedgerEntry) -> None:
        if entry.event in _COMMITS:
            self._commit(_ref_of(entry))
        elif entry.event in _BRANCHES and "checkpoint" in entry.fields:
            self._branch_off(entry)
        elif entry.event == Event.CHECKPOINT_IMPORTED:
            self._import(_ref_of(entry))
        elif entry.event == Event.RUN_BRANCHED:
            self._branched_from = entry.fields
        elif entry.event in _LOOKS:
            self._look(entry, _text(entry, "id"))
        elif entry.event == Event.CHECKPOINT_COPIED:
            self._copied(_text(entry, "id"), _text(entry, "tier"))
        elif entry.event == Event.CHECKPOINT_RETIRED and (tier := _text(entry, "tier")):
            self._retired_copy(_text(entry, "id"), tier)
        elif entry.event == Event.CHECKPOINT_SUSPECTED and "from_step" in entry.fields:
            self._suspect(entry)
        elif entry.event in (Event.RUN_RELEASED, Event.RUN_UNPAUSED):
            self._suspect_from = None
        else:
            self._mark(entry.event, _text(entry, "id"))

    def _commit(self, ref: CheckpointRef) -> None:
        if ref.id in self._refs:
            return
        if self._suspect_from is not None and ref.attempt == self._suspect_from[0] and ref.step >= self._suspect_from[1]:
            ref = replace(ref, suspect=True)
        self._refs[ref.id] = ref
        is_ours = ref.attempt >= self._branch[0] and (ref.parent in (None, self._base) or ref.parent in self._line)
        # A save whose branch was given up while it was on its way still descends from its own parent.
        self._before[ref.id] = next(reversed(self._line), None) if is_ours else ref.parent
        if is_ours:
            self._line[ref.id] = None

    def _import(self, ref: CheckpointRef) -> None:
        """From another run or tool. A run that stands on nothing goes on from it; any other one only when it is told to."""
        if ref.id in self._refs:
            return
        self._refs[ref.id] = ref
        self._before[ref.id] = None
        if not self._line and self._base is None:
            self._line[ref.id] = None

    def _branch_off(self, entry: LedgerEntry) -> None:
        start = _text(entry, "checkpoint")
        self._struck.discard(start or "")
        self._line = self._chain(start)
        self._base = None if start in self._refs else start
        self._branch = (entry.attempt, entry.seq)
        if entry.event == Event.RUN_RESUMED and start in self._refs:
            # A process that never saw it being written has loaded it.
            self._rejected.discard(start)
            self._refs[start] = _raised(self._refs[start], Rung.LOADABLE)

    def _chain(self, start: str | None) -> dict[str, None]:
        chain: dict[str, None] = {}
        while start in self._refs and start not in chain:
            chain[start] = None
            start = self._before[start]
        return {name: None for name in reversed(chain) if name not in self._struck}

    def _look(self, entry: LedgerEntry, checkpoint: str | None) -> None:
        """A look that finds all well takes an earlier finding of damage back; one that loaded it, an earlier rejection too."""
        if checkpoint is None:
            return
        self._looks.setdefault(checkpoint, []).append(_look_of(entry))
        ref = self._refs.get(checkpoint)
        if ref is None:
            return
        if entry.event == Event.CHECKPOINT_DAMAGED:
            self._refs[checkpoint] = replace(ref, damaged=True)
            return
        rung = {Event.CHECKPOINT_LOADED.value: Rung.LOADABLE, Event.CHECKPOINT_PROVEN.value: Rung.PROVEN}.get(entry.event, Rung.COMMITTED)
        self._refs[checkpoint] = replace(_raised(ref, rung), read_back=True, damaged=False)
        if rung is not Rung.COMMITTED:
            self._rejected.discard(checkpoint)

    def _copied(self, checkpoint: str | None, tier: str | None) -> None:
        if checkpoint and tier and tier not in self._tiers.setdefault(checkpoint, []):
            self._tiers[checkpoint].append(tier)

    def _retired_copy(self, checkpoint: str | None, tier: str) -> None:
        """The copy is gone; the checkpoint itself is where it was."""
        if checkpoint and tier in (tiers := self._tiers.get(checkpoint, [])):
            tiers.remove(tier)

    def _mark(self, event: str, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if event == Event.CHECKPOINT_ABANDONED:
            self._struck.add(checkpoint)
            self._line.pop(checkpoint, None)
        elif event == Event.CHECKPOINT_RETIRED:
            self._retired.add(checkpoint)
        elif event == Event.CHECKPOINT_REJECTED:
            self._rejected.add(checkpoint)
        elif event == Event.CHECKPOINT_SUSPECTED and checkpoint in self._refs:
            self._refs[checkpoint] = replace(self._refs[checkpoint], suspect=True)

    def _suspect(self, entry: LedgerEntry) -> None:
        """All of the line from a step on: those that are there, and those that the same attempt still saves before somebody has looked."""
        first = _number(entry, "from_step", default=0)
        self._suspect_from = (entry.attempt, first)
        for name in self._line:
            if self._refs[name].step >= first:
                self._refs[name] = replace(self._refs[name], suspect=True)

    def result(self, counters: Counters) -> Lineage:
        return Lineage(
            counters=counters,
            refs=tuple(replace(ref, abandoned=ref.id not in self._line) for ref in self._refs.values()),
            line=tuple(self._line),
            retired=frozenset(self._retired),
            rejected=frozenset(self._rejected),
            base=self._base,
            branch_attempt=self._branch[0],
            branch_seq=self._branch[1],
            looks={name: tuple(looks) for name, looks in self._looks.items()},
            tiers={name: tuple(tiers) for name, tiers in self._tiers.items() if tiers},
            branched_from=self._branched_from,
        )


def adoptable(published: Sequence[Manifest], lineage: Lineage) -> list[Manifest]:
    """Checkpoints that were published but whose commit the ledger lacks, because the writer died in between: to be ledgered, in this order.

    Only what continues the line is: its parent is the head (or one adopted just before), and no resume or roll-back came after it was
    written, for then the run has gone on without it. Of several tries at one save the last counts.
    """
    adopted: list[Manifest] = []
    head = lineage.line[-1] if lineage.line else lineage.base
    waiting = [manifest for manifest in published if lineage.ref(manifest.id) is None and _is_of_this_branch(manifest, lineage)]
    while following := [manifest for manifest in waiting if manifest.parent == head]:
        chosen = max(following, key=lambda manifest: (manifest.attempt, manifest.step, manifest.ledger_seq, len(manifest.id), manifest.id))
        adopted.append(chosen)
        head = chosen.id
        waiting = [manifest for manifest in waiting if manifest.parent != chosen.parent]
    return adopted


def _is_of_this_branch(manifest: Manifest, lineage: Lineage) -> bool:
    is_after_branch = manifest.attempt >= lineage.branch_attempt and manifest.ledger_seq >= lineage.branch_seq
    return is_after_branch and manifest.ledger_seq <= lineage.counters.seq


def _raised(ref: CheckpointRef, rung: Rung) -> CheckpointRef:
    return replace(ref, rung=max(ref.rung, rung, key=_ORDER.index))


def _look_of(entry: LedgerEntry) -> Look:
    found = entry.fields.get("problems")
    problems = [item if isinstance(item, Mapping) else {"detail": item} for item in found] if isinstance(found, list | tuple) else []
    return Look(
        event=entry.event,
        time_utc=entry.time_utc,
        host=_text(entry, "host") or "",
        by=_text(entry, "by") or entry.by,
        world_size=_number(entry, "world_size", default=0),
        bad_files=tuple(sorted({name for problem in problems for name in str(problem.get("file", "")).split(",") if name})),
        details=tuple(f"{problem.get('kind', '')} {problem.get('detail', '')}".strip() for problem in problems),
    )


def _ref_of(entry: LedgerEntry) -> CheckpointRef:
    fields = entry.fields
    return CheckpointRef(
        id=str(fields.get("id", "")),
        step=_number(entry, "step", default=entry.step),
        attempt=_number(entry, "attempt", default=entry.attempt),
        parent=_text(entry, "parent"),
        state_digest=str(fields.get("state_digest", "")),
        num_bytes=_number(entry, "num_bytes", default=0),
    )


def _text(entry: LedgerEntry, name: str) -> str | None:
    value = entry.fields.get(name)
    return value if isinstance(value, str) and value else None


def _number(entry: LedgerEntry, name: str, *, default: int) -> int:
    value = entry.fields.get(name)
    return value if isinstance(value, int) else default
