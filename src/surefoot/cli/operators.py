"""What the verbs of operators share: whether a run is live, an order to it, and the wait for its answer in the ledger."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli.console import say
from surefoot.cli.ledgering import user_name
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.holder import LockRecord
from surefoot.core.records import LedgerEntry
from surefoot.core.strict_json import dumps
from surefoot.observe.control import Order, append_order
from surefoot.observe.halts import is_hold, standing_halt
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.ledger_tail import LedgerTail
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.live import is_held, read_lock
from surefoot.observe.run_dir import require_run

SCHEMA_VERSION = 1
_LOOK_S = 0.1
_EVENTS = (
    *(Event.ORDER_TAKEN, Event.ORDER_REFUSED, Event.RUN_PAUSED, Event.RUN_UNPAUSED, Event.RUN_LEFT, Event.RUN_HALTED),
    *(
        Event.GENERATION_STARTED,
        Event.CHECKPOINT_COMMITTED,
        Event.CHECKPOINT_ADOPTED,
        Event.RUN_ROLLED_BACK,
        Event.BLOCK_TAKEN,
        Event.BLOCK_REFUSED,
    ),
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the ledger.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run has done it, or only give the order.")]
WaitS = Annotated[float, typer.Option("--wait-s", metavar="SECONDS", min=0.0, help="How long to wait at most: steps can be long.")]
WAIT_S = 600.0

_VERBS = {"rollback": "roll back"}  # where the command is no word of a sentence


@dataclass(frozen=True, slots=True)
class Told:
    """What a verb says in the end. `state`: given (nobody waited), done, or asked (of the next start). `more` are the verb's own keys."""

    verb: str
    run_dir: Path
    state: str
    words: str
    order: str | None = None
    by: str = ""
    step: int | None = None
    seq: int | None = None
    more: Mapping[str, Any] | None = None

    def say(self, *, json_output: bool) -> None:
        if not json_output:
            say(self.words)
            return
        told: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "verb": self.verb, "run": str(self.run_dir), "state": self.state}
        told |= {"order": self.order, "by": self.by, "step": self.step, "seq": self.seq, "words": self.words}
        say(dumps({**told, **(self.more or {})}))


def user_at_host() -> str:
    """Who gives an order, and where: a ledger is read by people of several machines."""
    return f"{user_name()}@{socket.gethostname()}"


def live_job(run_dir: Path, *, clock: Clock | None = None) -> LockRecord | None:
    """The lock of the job that trains the run now, None without one.

    Raises ConfigError when the folder is no run, or when its lock says that a job holds it which does not renew it.
    """
    clock = clock or SystemClock()
    require_run(run_dir)
    lock = read_lock(run_dir)
    if lock is None or not is_held(lock, clock=clock):
        return None
    if (age_s := lock.age_s(clock.utc())) > lock.lease_s:
        holder = lock.holder
        raise ConfigError(
            f"its lock says that pid {holder.pid} on {holder.host} trains it, and has not been renewed for {age_s:.0f} s",
            where=str(run_dir),
            hint="this is a copy of the folder of a run that trains elsewhere, or that job stands still: "
            "give the folder in which it trains, or look at that process",
            got=age_s,
            limit=lock.lease_s,
        )
    return lock


def require_live(run_dir: Path, verb: str) -> LockRecord:
    """Raises ConfigError when nobody trains the run now, with what that means."""
    if (lock := live_job(run_dir)) is not None:
        return lock
    entries = read_ledger(run_dir / LEDGER_NAME, up_to_damage=True)
    halt = standing_halt(entries)
    if fold_lineage(entries).counters.finished:
        what, hint = "the run is finished", f"there is nothing to {verb}"
    elif halt is not None:
        state = "held" if is_hold(halt) else "halted" if halt.event == Event.RUN_HALTED else "paused"
        what = f"the run is not live: it was {state} at step {halt.step}: {halt.reason}"
        hint = f"`surefoot resume {run_dir}` releases it, `surefoot train {run_dir}` goes on then"
    else:
        what, hint = "the run is not live: no job trains it now", f"`surefoot train {run_dir}` goes on with it"
    raise ConfigError(what, where=str(run_dir), hint=hint)


class Desk:
    """One order to one live run: given, and followed in the ledger until `wait_s` is over."""

    def __init__(self, run_dir: Path, verb: str, *, job: LockRecord, wait_s: float, clock: Clock | None = None) -> None:
        self._run_dir = run_dir
        self._verb = verb
        self._to_do = _VERBS.get(verb, verb)
        self._job = job
        self._clock = clock or SystemClock()
        self._wait_s = wait_s
        self._give_up_s = self._clock.monotonic_s() + wait_s
        self._order: Order | None = None
        self._tail = LedgerTail(run_dir / LEDGER_NAME, events=_EVENTS, clock=self._clock, look_every_s=0.0)
        self._seen: list[LedgerEntry] = []

    def give(self, *, reason: str = "", **fields: Any) -> Told:
        """Write the order into the control file."""
        order = Order(self._verb, user_at_host(), self._job.job, self._clock.utc(), reason, fields)
        append_order(self._run_dir, order, clock=self._clock)
        self._order = order
        words = f"{self._verb}: the order is given; `surefoot ledger {self._run_dir}` tells the answer"
        return Told(self._verb, self._run_dir, "given", words, order=order.id, by=order.by)

    def answer(self) -> LedgerEntry:
        """The `order.taken` of what was given. Raises ConfigError with the reason of a refusal, SurefootError when none came."""
        order = self._order
        assert order is not None
        answers = (Event.ORDER_TAKEN, Event.ORDER_REFUSED)
        entry = self.until(lambda entry: entry.event in answers and entry.fields.get("id") == order.id)
        if entry.event == Event.ORDER_REFUSED:
            raise self._refused(entry)
        return entry

    def until_done(self, taken: LedgerEntry, event: Event) -> LedgerEntry:
        """The first `event` behind the answer `taken`. Raises ConfigError when the run could not do after all what it had taken."""
        order, ends = taken.fields.get("id"), (event, Event.ORDER_REFUSED)
        entry = self.until(
            lambda entry: entry.seq > taken.seq and entry.event in ends and (entry.event == event or entry.fields.get("id") == order)
        )
        if entry.event == Event.ORDER_REFUSED:
            raise self._refused(entry)
        return entry

    def _refused(self, entry: LedgerEntry) -> ConfigError:
        return ConfigError(f"the run refused to {self._to_do}: {entry.reason}", where=str(self._run_dir), seq=entry.seq)

    def until(self, is_it: Callable[[LedgerEntry], bool]) -> LedgerEntry:
        """The first entry that `is_it`. Raises SurefootError when the job is gone without it, or the wait is over."""
        for entry in self._entries():
            if is_it(entry):
                return entry
        raise AssertionError("the entries of a ledger have no end")

    def entries_after(self, entry: LedgerEntry, events: Sequence[Event], *, number: int) -> list[LedgerEntry]:
        """The first `number` of these `events` behind `entry`. Raises as `until`."""
        found: list[LedgerEntry] = []
        while len(found) < number:
            last = found[-1] if found else entry
            found.append(self.until(partial(_follows, last, events)))
        return found

    def until_gone(self) -> None:
        """Raises SurefootError when the job is still there at the end of the wait."""
        while self._is_live():
            self._pause()

    def told(self, entry: LedgerEntry, words: str, *, more: Mapping[str, Any] | None = None) -> Told:
        assert self._order is not None
        return Told(self._verb, self._run_dir, "done", words, self._order.id, self._order.by, entry.step, entry.seq, more)

    def checkpoint(self, name: object) -> dict[str, Any] | None:
        """{id, step, rung} of a checkpoint, as the ledger has it now."""
        ref = fold_lineage(read_ledger(self._run_dir / LEDGER_NAME)).ref(str(name)) if name else None
        return {"id": ref.id, "step": ref.step, "rung": ref.rung.value} if ref is not None else None

    def _entries(self) -> Iterator[LedgerEntry]:
        yield from list(self._seen)
        while True:
            was_live = self._is_live()  # before the look: what a job wrote before it ended is seen
            news = self._tail.news(now=True)
            self._seen += news
            yield from news
            if not was_live:
                last = self._seen[-1] if self._seen else None
                how = f"; its last word: {last.event}{': ' + last.reason if last.reason else ''}" if last is not None else ""
                what = f"the run ended before it could {self._to_do}{how}"
                raise SurefootError(what, where=str(self._run_dir), hint=f"`surefoot status {self._run_dir}` says how it stands")
            if not news:
                self._pause()

    def _is_live(self) -> bool:
        lock = read_lock(self._run_dir)
        return lock is not None and lock.job == self._job.job and is_held(lock, clock=self._clock)

    def _pause(self) -> None:
        if self._clock.monotonic_s() >= self._give_up_s:
            raise SurefootError(
                f"no answer to the order to {self._to_do} within {self._wait_s:g} s",
                where=str(self._run_dir),
                hint="the order stands: a run reads it after its step; `surefoot status` says whether it moves, --wait-s waits longer",
                limit=self._wait_s,
            )
        self._clock.sleep(_LOOK_S)


def _follows(last: LedgerEntry, events: Sequence[Event], entry: LedgerEntry) -> bool:
    return entry.event in events and entry.seq > last.seq
