"""The alerter: tells people what the ledger says, by webhook, Slack, mail or a command. `python -m surefoot.cli.alerter`, an aide.

It is there only where [alerts] names somewhere, reads the ledger from outside, and holds no training up. What it has told is in the ledger
(`alert.sent`), so it may be killed at any time. A delivery that fails is tried again with growing waits; what never arrives is ledgered,
and so is the first failure of each place, once until it works again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
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


class Alerter:
    """`look` reads what is new and delivers what is due. One thread; a delivery may take as long as `alerts.timeout_s` allows."""

    def __init__(self, run_dir: Path, *, section: AlertsSection, places: Sequence[Destination], sender: Sender, clock: Clock) -> None:
        self._run_dir, self._section, self._places, self._sender, self._clock = run_dir, section, tuple(places), sender, clock
        events = [event for event in Event if event.value in FOLDED_EVENTS]
        self._tail = LedgerTail(run_dir / LEDGER_NAME, events=events, clock=clock, look_every_s=0.0)
        self._since_s = self._now_s() - HOUR_S
        self._state = AlertState()
        self._tries: dict[tuple[str, ...], int] = {}
        self._next_try_s = 0.0
        self._is_down: dict[str, str] = {}

    @property
    def has_news(self) -> bool:
        """Whether something waits to be told."""
        return bool(self._state.pending)

    def look(self, *, is_over: bool = False) -> None:
        """`is_over`: the run has ended, so nothing is waited for any more."""
        self._read()
        now_s = self._now_s()
        if now_s < self._next_try_s and not is_over:
            return
        for names in due(self._state, now_s=now_s, limits=self._section, is_over=is_over):
            self._tell(names)

    def _read(self) -> None:
        try:
            for entry in self._tail.news():
                self._state = noted(self._state, entry, since_s=self._since_s)
        except (OSError, SurefootError) as error:
            logger.warning("the ledger could not be read: %s", error)

    def _tell(self, names: tuple[str, ...]) -> None:
        alert = alert_of(self._state, names, sender=self._sender)
        limit_s = self._section.timeout_s
        failed = {place.name: words for place in self._places if (words := attempt_delivery(place, alert, timeout_s=limit_s))}
        self._note_failures(alert, failed)
        if len(failed) < len(self._places):
            self._tries.pop(names, None)
            self._remember(Event.ALERT_SENT, alert, to=[place.name for place in self._places if place.name not in failed])
            return
        num_tries = self._tries[names] = self._tries.get(names, 0) + 1
        self._next_try_s = self._now_s() + wait_after_s(num_tries)
        if num_tries >= MAX_TRIES:
            del self._tries[names]
            self._remember(Event.ALERT_FAILED, alert, reason=f"given up after {num_tries} tries", to=[*failed])

    def _note_failures(self, alert: Alert, failed: Mapping[str, str]) -> None:
        """Each place once, until it has worked again."""
        for name, words in failed.items():
            if name not in self._is_down:
                logger.warning("alerts to %s fail: %s", name, words)
                self._ledger(Event.ALERT_FAILED, words, {"kind": alert.kind, "to": [name]})
        for name in set(self._is_down) - set(failed):
            logger.warning("alerts to %s arrive again", name)
        self._is_down = dict(failed)

    def _remember(self, event: Event, alert: Alert, *, to: Sequence[str], reason: str = "") -> None:
        """That `alert` needs nothing more. Ledgered when it can be; remembered in any case, so that a full disk sends nothing twice."""
        seq = self._ledger(event, reason, {"kind": alert.kind, "count": alert.count, "to": list(to), "covers": dict(alert.covers)})
        kind = alert.kind if event is Event.ALERT_SENT else ""
        self._state = told(self._state, kind, covers=alert.covers, seq=seq, when_s=self._now_s())

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
