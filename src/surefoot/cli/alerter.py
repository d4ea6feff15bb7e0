"""The alerter: tells people what the ledger says, by webhook, Slack, mail or a command. `python -m surefoot.cli.alerter`, an aide.

It is there only where [alerts] names somewhere, reads the ledger from outside, and holds no training up. What it has told is in the ledger
(`alert.sent`), place by place, so it may be killed at any time. A delivery that fails is tried again with growing waits; what never arrives
is ledgered, and so is the first failure of each place, once until it works again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from surefoot.cli.ledgering import tell
from surefoot.config import load_config
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.sections import AlertsSection
from surefoot.heal.alert_senders import Destination, Undelivered, deliver, destinations
from surefoot.heal.alerts import (
    FOLDED_EVENTS,
    HOUR_S,
    Alert,
    AlertState,
    Sender,
    alert_of,
    due,
    is_named,
    noted,
    seconds_of,
    told,
    trial_alert,
)
from surefoot.launch.aide import AideSpec
from surefoot.launch.aide_duty import Duty
from surefoot.observe.ledger import LEDGER_NAME
from surefoot.observe.ledger_tail import LedgerTail
from surefoot.observe.run_dir import CONFIG_NAME

logger = logging.getLogger(__name__)

# No settings: a look is one stat of a file, and people notice neither.
LOOK_INTERVAL_S: Final = 0.25
_BY: Final = "alerter"
# A receiver that is down for longer than these waits together (45 minutes) misses what happened meanwhile; the ledger has it.
MAX_TRIES: Final = 16
_MAX_WAIT_S: Final = 300.0
_LAST_TRIES: Final = 2
"""At the end of the run, when the agent waits."""


def alert_aides(section: AlertsSection, *, run_dir: Path) -> list[AideSpec]:
    """None where alerts go nowhere. Raises ConfigError for what [alerts] names and cannot be used."""
    if not is_named(section):
        return []
    places = destinations(section, environ=os.environ, host=socket.gethostname())
    argv = (sys.executable, "-m", "surefoot.cli.alerter", "--run-dir", str(run_dir.absolute()))
    end_limit_s = (_LAST_TRIES * len(places) + 1) * section.timeout_s
    return [AideSpec("alerter", argv, end_limit_s=end_limit_s)]


def sender_of(section: AlertsSection, *, run: str, run_dir: Path) -> Sender:
    return Sender(run, str(run_dir), socket.gethostname(), section.runbook)


def trial_deliveries(target: Path) -> Iterator[tuple[str, str]]:
    """(place, what went wrong or "") for each place that the config `target`, or that of a run, names. Raises ConfigError when none is."""
    config = load_config(target / CONFIG_NAME if target.is_dir() else target).config
    if not is_named(config.alerts):
        raise ConfigError("[alerts] names no place", where=str(target), hint='webhook = "https://...", slack, email or command')
    sender = sender_of(config.alerts, run=config.run.name, run_dir=Path(config.run.dir))
    alert = trial_alert(sender, time_utc=SystemClock().utc())
    for place in destinations(config.alerts, environ=os.environ, host=socket.gethostname()):
        yield place.name, attempt_delivery(place, alert, timeout_s=config.alerts.timeout_s)


def attempt_delivery(place: Destination, alert: Alert, *, timeout_s: float) -> str:
    """What went wrong, empty when nothing did."""
    try:
        deliver(place, alert, timeout_s=timeout_s)
    except Undelivered as error:
        return error.what
    except Exception as error:  # a sender's boundary: what it meets must not silence the others, and its words may hold a secret
        return type(error).__name__
    return ""


def wait_after_s(num_tries: int) -> float:
    """Before the next try, after so many that failed."""
    return float(min(_MAX_WAIT_S, 2.0 ** (num_tries - 1)))


@dataclass
class _Desk:
    """What one place was told, and what it still has to be told.

    `tries` counts failures in a row by kind: a kind may join others under way, so an alert as a whole has no count. `next_try_s` is on the
    monotonic clock: one that is set neither hurries nor delays a try.
    """

    place: Destination
    state: AlertState = field(default_factory=AlertState)
    tries: Counter[str] = field(default_factory=Counter)
    next_try_s: float = 0.0
    is_down: bool = False


class Alerter:
    """`look` reads what is new and delivers what is due, place by place: one that is down has it later.

    One thread; a delivery may take as long as `alerts.timeout_s` allows. When something is due is told by the stamps of the ledger: an
    alerter that takes over reads the same.
    """

    def __init__(self, run_dir: Path, *, section: AlertsSection, places: Sequence[Destination], sender: Sender, clock: Clock) -> None:
        self._run_dir, self._section, self._sender, self._clock = run_dir, section, sender, clock
        events = [event for event in Event if event.value in FOLDED_EVENTS]
        self._tail = LedgerTail(run_dir / LEDGER_NAME, events=events, clock=clock, look_every_s=0.0)
        self._since_s = self._now_s() - HOUR_S
        self._desks = [_Desk(place) for place in places]

    @property
    def has_news(self) -> bool:
        """Whether something waits to be told somewhere."""
        return any(desk.state.pending for desk in self._desks)

    def look(self, *, is_over: bool = False) -> None:
        """`is_over`: the run has ended, so nothing is waited for any more."""
        self._read()
        now_s = self._clock.monotonic_s()
        ready = [desk for desk in self._desks if is_over or now_s >= desk.next_try_s]
        queues = {desk.place.name: list(due(desk.state, now_s=self._now_s(), limits=self._section, is_over=is_over)) for desk in ready}
        while waiting := [desk for desk in ready if queues[desk.place.name]]:
            names = queues[waiting[0].place.name][0]
            alert = alert_of(waiting[0].state, names, sender=self._sender)
            together = [desk for desk in waiting if names in queues[desk.place.name] and self._says(desk, names, alert)]
            for desk in together:
                queues[desk.place.name].remove(names)
            for desk in self._tell(alert, together):
                self._put_off(desk, {name for rest in (names, *queues[desk.place.name]) for name in rest})
                queues[desk.place.name].clear()

    def _says(self, desk: _Desk, names: tuple[str, ...], alert: Alert) -> bool:
        return alert_of(desk.state, names, sender=self._sender) == alert

    def _read(self) -> None:
        try:
            for entry in self._tail.news():
                for desk in self._desks:
                    desk.state = noted(desk.state, entry, since_s=self._since_s, place=desk.place.name)
        except (OSError, SurefootError) as error:
            logger.warning("the ledger could not be read: %s", error)

    def _tell(self, alert: Alert, desks: Sequence[_Desk]) -> list[_Desk]:
        """The desks whose place did not take it."""
        failed: list[_Desk] = []
        for desk in desks:
            words = attempt_delivery(desk.place, alert, timeout_s=self._section.timeout_s)
            self._note_place(desk, alert, words)
            failed += [desk] if words else []
        if arrived := [desk for desk in desks if desk not in failed]:
            self._remember(Event.ALERT_SENT, alert, arrived)
            for desk in arrived:
                desk.tries.clear()
                desk.next_try_s = 0.0
        return failed

    def _note_place(self, desk: _Desk, alert: Alert, words: str) -> None:
        """A failure once, until the place has worked again."""
        name = desk.place.name
        if words and not desk.is_down:
            logger.warning("alerts to %s fail: %s", name, words)
            self._ledger(Event.ALERT_FAILED, words, {"kind": alert.kind, "to": [name]})
        elif desk.is_down and not words:
            logger.warning("alerts to %s arrive again", name)
        desk.is_down = bool(words)

    def _put_off(self, desk: _Desk, kinds: set[str]) -> None:
        """A failure counts for all that was due there: the place is what fails. What was due too often is given up."""
        desk.tries.update(kinds)
        desk.next_try_s = self._clock.monotonic_s() + wait_after_s(max(desk.tries[kind] for kind in kinds))
        if given_up := tuple(sorted(kind for kind in kinds if desk.tries[kind] >= MAX_TRIES)):
            alert = alert_of(desk.state, given_up, sender=self._sender)
            self._remember(Event.ALERT_FAILED, alert, [desk], reason=f"given up after {MAX_TRIES} tries")
            for kind in given_up:
                del desk.tries[kind]

    def _remember(self, event: Event, alert: Alert, desks: Sequence[_Desk], *, reason: str = "") -> None:
        """That `alert` needs nothing more there. Ledgered when it can be; remembered in any case: a full disk sends nothing twice."""
        names = [desk.place.name for desk in desks]
        seq = self._ledger(event, reason, {"kind": alert.kind, "count": alert.count, "to": names, "covers": dict(alert.covers)})
        kind = alert.kind if event is Event.ALERT_SENT else ""
        for desk in desks:
            desk.state = told(desk.state, kind, covers=alert.covers, seq=seq, when_s=self._now_s())

    def _ledger(self, event: Event, reason: str, fields: Mapping[str, object]) -> int:
        """The seq of the line; a negative one of its own when it could not be written."""
        try:
            return tell(self._run_dir, event, by=_BY, reason=reason, fields=fields).seq
        except (OSError, SurefootError) as error:
            logger.warning("%s could not be ledgered: %s", event, error)
            return -int(self._clock.monotonic_s() * 1e6) - 1

    def _now_s(self) -> float:
        return seconds_of(self._clock.utc())


def main(arguments: Sequence[str] | None = None) -> int:
    duty = Duty.begin(arguments, prog="surefoot.cli.alerter")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    config = load_config(duty.run_dir / CONFIG_NAME).config
    places = destinations(config.alerts, environ=os.environ, host=socket.gethostname())
    sender = sender_of(config.alerts, run=config.run.name, run_dir=duty.run_dir)
    alerter = Alerter(duty.run_dir, section=config.alerts, places=places, sender=sender, clock=SystemClock())
    while not duty.is_over:
        alerter.look()
        duty.wait(LOOK_INTERVAL_S)
    for _ in range(_LAST_TRIES):
        alerter.look(is_over=True)
        if not alerter.has_news:
            break
    else:
        logger.warning("the run is over and not all of it could be told: the next start tells it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
