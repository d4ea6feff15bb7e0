"""From ledger entries to alerts: grouped by kind, not repeated too soon, bounded per hour. Pure; the clock is the one of the ledger, UTC.

What has been told is said by the ledger itself (`alert.sent`), so whoever sends may be killed at any moment: the next one folds the same
entries and goes on. Killed between a delivery and its line, it tells twice rather than never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import AlertsSection
from surefoot.heal.alert_kinds import EVENTS, KINDS, TEST, WITHHELD, Severity, is_answer, kind_of, ranks_of

HOUR_S: Final = 3600.0
RUNBOOK: Final = "runbook entry: "  # docs/runbook.md is no address that a pager can open
_KEPT_ENTRIES: Final = 32  # of a group: whatever is said of it is said by these, the rest is counted
_GRAVER: Final = ("page", "warn", "info")
_ASKS: Final = ("pause", "rollback", "skip", "alert", "record")
_TELLING: Final = (Event.ALERT_SENT.value, Event.ALERT_FAILED.value)
FOLDED_EVENTS: Final = frozenset({*EVENTS, *_TELLING})
"""The ledger events that `noted` makes something of."""


@dataclass(frozen=True, slots=True)
class Alert:
    """What a person gets. `what` happened, `where`, which `action` was taken, what to type next; `count` entries are told by it.

    `covers` are the newest ledger entries that it tells of, by kind. For `alerts-withheld`, `counts` are the entries of each kind.
    """

    kind: str
    severity: Severity
    run: str
    run_dir: str
    host: str
    step: int
    attempt: int
    generation: int
    time_utc: str
    what: str
    where: str
    action: str
    command: str
    runbook: str
    count: int = 1
    ranks: tuple[int, ...] = ()
    covers: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        more = f" ({self.count} times)" if self.count > 1 and self.kind != WITHHELD else ""
        return f"{self.run}: {KINDS[self.kind].title}{more}"


@dataclass(frozen=True, slots=True)
class Sender:
    """Who tells: the run as people call it, its folder as they type it, and this machine."""

    run: str
    run_dir: str
    host: str
    runbook: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Entries of one kind that nobody was told of. `count` is that of all that make news; `entries` holds the first and the newest."""

    entries: tuple[LedgerEntry, ...]
    count: int

    @property
    def since_s(self) -> float:
        return seconds_of(self.entries[0].time_utc)


@dataclass(frozen=True, slots=True)
class AlertState:
    """`pending` by kind; `told_s` when each kind was last told; `sent` (ledger seq, when) of the alerts of the last hour that count."""

    pending: Mapping[str, Group] = field(default_factory=dict)
    told_s: Mapping[str, float] = field(default_factory=dict)
    told_seq: Mapping[str, int] = field(default_factory=dict)
    sent: tuple[tuple[int, float], ...] = ()


def is_named(section: AlertsSection) -> bool:
    """Whether alerts go anywhere."""
    return bool(section.webhook or section.slack or section.email or section.command)


def seconds_of(time_utc: str) -> float:
    return datetime.fromisoformat(time_utc).timestamp()


def noted(state: AlertState, entry: LedgerEntry, *, since_s: float = 0.0, place: str = "") -> AlertState:
    """`state` after one more entry of the ledger. What is older than `since_s` is no news unless something was told before it happened.

    With `place` the state is that place's: what another one was told, or will never be told, is no matter of its.
    """
    if entry.event in _TELLING:
        to = entry.fields.get("to")
        if place and isinstance(to, list) and place not in to:
            return state
        covers = entry.fields.get("covers")
        kind = str(entry.fields.get("kind", "")) if entry.event == Event.ALERT_SENT else ""
        return told(state, kind, covers=covers if isinstance(covers, Mapping) else {}, seq=entry.seq, when_s=seconds_of(entry.time_utc))
    kind_name = kind_of(entry)
    if kind_name is None or entry.seq <= state.told_seq.get(kind_name, 0):
        return state
    if seconds_of(entry.time_utc) < since_s and not state.told_s:
        return state
    group = state.pending.get(kind_name, Group((), 0))
    if not group.entries and is_answer(entry):
        return state  # to something that was told already, or that nobody is told of
    first, rest = group.entries[:1], group.entries[1:]
    kept = (*first, *(*rest, entry)[-(_KEPT_ENTRIES - 1) :]) if first else (entry,)
    return replace(state, pending={**state.pending, kind_name: Group(kept, group.count + (not is_answer(entry)))})


def told(state: AlertState, kind: str, *, covers: Mapping[str, Any], seq: int, when_s: float) -> AlertState:
    """`state` after an alert was delivered, or given up (then `kind` is empty). Saying so twice changes nothing."""
    last = {name: int(number) for name, number in covers.items()}
    pending = {name: left for name, group in state.pending.items() if (left := _after(group, last.get(name, 0))) is not None}
    seqs = {**state.told_seq, **{name: max(number, state.told_seq.get(name, 0)) for name, number in last.items()}}
    counts = kind in KINDS and not KINDS[kind].ends and all(number != seq for number, _ in state.sent)
    sent = tuple(one for one in state.sent if one[1] > when_s - HOUR_S)
    times = {**state.told_s, **dict.fromkeys(last, when_s)}
    return AlertState(pending, times, seqs, (*sent, (seq, when_s)) if counts else sent)


def _after(group: Group, seq: int) -> Group | None:
    """What of a group is newer than `seq`."""
    left = tuple(entry for entry in group.entries if entry.seq > seq)
    if len(left) == len(group.entries):
        return group
    count = sum(not is_answer(entry) for entry in left)
    return Group(left, count) if count else None


def due(state: AlertState, *, now_s: float, limits: AlertsSection, is_over: bool = False) -> tuple[tuple[str, ...], ...]:
    """The groups of kinds to tell now, the gravest first: one kind each, but what the bound per hour held back is told together.

    When the run `is_over` nothing is waited for any more, but the bound holds.
    """
    ready = [name for name, group in state.pending.items() if is_over or now_s >= _ready_s(name, group, state, limits)]
    ready.sort(key=lambda name: (_GRAVER.index(KINDS[name].severity), state.pending[name].since_s))
    at_once = [(name,) for name in ready if KINDS[name].ends]
    others = [name for name in ready if not KINDS[name].ends]
    times_s = [when_s for _, when_s in state.sent if when_s > now_s - HOUR_S]
    room = limits.max_per_hour - len(times_s)
    if len(others) <= room:
        return (*at_once, *((name,) for name in others))
    # The last place of the hour tells the rest together, and then nothing more of the sort goes out until there is room.
    alone, together = others[: max(0, room - 1)], others[max(0, room - 1) :]
    return (*at_once, *((name,) for name in alone), *((tuple(together),) if room > 0 else ()))


def _ready_s(name: str, group: Group, state: AlertState, limits: AlertsSection) -> float:
    if KINDS[name].ends:
        return group.since_s
    return max(group.since_s + limits.group_s, state.told_s.get(name, float("-inf")) + limits.repeat_s)


def alert_of(state: AlertState, names: Sequence[str], *, sender: Sender) -> Alert:
    """The alert about the pending groups of `names`: of one kind, or of several that were held back."""
    groups = {name: state.pending[name] for name in names}
    if len(names) == 1:
        return _alert(names[0], groups[names[0]], sender=sender)
    newest = max((group.entries[-1] for group in groups.values()), key=lambda entry: entry.seq)
    counts = {name: group.count for name, group in groups.items()}
    total = sum(counts.values())
    what = f"{total} entries since the last alert: " + ", ".join(f"{count} of {name}" for name, count in counts.items())
    return replace(
        _alert(WITHHELD, Group((newest,), total), sender=sender),
        what=what,
        ranks=(),
        covers={name: group.entries[-1].seq for name, group in groups.items()},
        counts=counts,
    )


def trial_alert(sender: Sender, *, time_utc: str) -> Alert:
    """What `surefoot doctor --alerts` sends."""
    entry = LedgerEntry(0, time_utc, 0, 0, 0, "", "", "", "sent by surefoot doctor --alerts", {}, "", "")
    return replace(_alert(TEST, Group((entry,), 1), sender=sender), covers={})


def _alert(name: str, group: Group, *, sender: Sender) -> Alert:
    kind, told_of = KINDS[name], _representative(group.entries)
    ranks = tuple(sorted({rank for entry in group.entries for rank in ranks_of(entry)}))
    return Alert(
        kind=name,
        severity=kind.severity,
        run=sender.run,
        run_dir=sender.run_dir,
        host=sender.host,
        step=_step_of(told_of),
        attempt=told_of.attempt,
        generation=told_of.generation,
        time_utc=told_of.time_utc,
        what=_what(told_of, kind.title),
        where=_where(told_of, ranks, host=sender.host),
        action=_action(group.entries) or kind.action,
        command=kind.command.replace("RUN", sender.run_dir),
        runbook=f"{sender.runbook}#{name}" if sender.runbook else f"{RUNBOOK}{name}",
        count=group.count,
        ranks=ranks,
        covers={name: group.entries[-1].seq},
    )


def _representative(entries: Sequence[LedgerEntry]) -> LedgerEntry:
    """The gravest of a group, the first of equals."""

    def grade(entry: LedgerEntry) -> int:
        asks = str(entry.fields.get("asks", ""))
        return (_ASKS.index(asks) if asks in _ASKS else len(_ASKS)) + (len(_ASKS) + 1 if is_answer(entry) else 0)

    return min(entries, key=grade)


def _what(entry: LedgerEntry, title: str) -> str:
    rule = str(entry.fields.get("rule") or entry.rule)
    cause = entry.fields.get("cause")
    parts = [entry.reason or title, f"cause: {cause}" if cause else ""]
    text = "; ".join(part for part in parts if part)
    return f"{rule}: {text}" if rule and entry.event in ("anomaly.found", "run.halted", "run.paused") else text


def _where(entry: LedgerEntry, ranks: Sequence[int], *, host: str) -> str:
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}" if ranks else ""
    step = f"step {_step_of(entry)}" if entry.attempt else ""
    place = f"attempt {entry.attempt}, generation {entry.generation}, ledger entry {entry.seq}" if entry.seq else ""
    return ", ".join(part for part in (named, step, place, f"host {host}") if part)


def _step_of(entry: LedgerEntry) -> int:
    """A finding is written while its step is not finished yet."""
    of_step = entry.fields.get("of_step")
    return of_step if isinstance(of_step, int) else entry.step


_DONE: Final[Mapping[str, str]] = {
    "skipupdate": "the update was skipped",
    "rollback": "a roll-back was decided",
    "pause": "the run was paused",
    "proceed": "none: training goes on",
}


def _action(entries: Sequence[LedgerEntry]) -> str:
    """What was done, by the entries of the group that say so."""
    said = []
    for entry in entries:
        if entry.event == "anomaly.found" and (done := _DONE.get(str(entry.fields.get("action", "")))):
            said.append(f"{done} (dry run)" if entry.fields.get("dry_run") else done)
        if entry.event == "restart.decided":
            said.append(f"{entry.fields.get('kind', 'restart')}: {entry.reason}")
        elif entry.event == "step.rechecked":
            said.append(f"step {_step_of(entry)} was computed again: {entry.reason}")
        elif entry.event == "episode.diagnosed" and entry.fields.get("phase") == "skipped" and entry.fields.get("cause") == "data":
            said.append("its samples are left out")
        elif entry.event == "run.rolled_back":
            said.append(f"training goes on from step {entry.step}, checkpoint {entry.fields.get('checkpoint')}")
    return "; ".join(dict.fromkeys(said))


def utc_of(when_s: float) -> str:
    return datetime.fromtimestamp(when_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
