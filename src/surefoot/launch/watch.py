"""The one place where the agent waits: for the nursery to speak or die, for a signal, or for the next look at the clock."""

from __future__ import annotations

import select
import signal
from collections.abc import Callable
from dataclasses import dataclass

from surefoot.core.clock import Clock
from surefoot.launch.nursery_link import NurseryLink
from surefoot.launch.signals import LeaveSignals
from surefoot.launch.wire import RankExit, Ready, Started

# Deadlines, liveness and the lock are looked at this often; exits, deaths and signals wake the agent at once, so it is no setting.
LOOK_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Forked:
    """The ranks exist; one pidfd each, owned by whoever takes the event."""

    started: Started
    pidfds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NurseryGone:
    """The last thing heard of a nursery: everything that it reported came before."""


Event = Ready | Forked | RankExit | NurseryGone


class Watch:
    """Waits for events and remembers the wish to leave. `on_look` runs after every wait: it must not block for long."""

    def __init__(self, signals: LeaveSignals, *, clock: Clock, on_look: Callable[[], None]) -> None:
        self._signals = signals
        self._clock = clock
        self._on_look = on_look
        self.asked: list[signal.Signals] = []
        self.asked_s: float | None = None

    @property
    def kill_asked(self) -> bool:
        """A second Ctrl-C: whoever sends it does not want to wait for a save."""
        return self.asked.count(signal.SIGINT) >= 2

    def events(self, nursery: NurseryLink | None) -> list[Event]:
        """Wait until something happens, at most a fifth of a second; what the nursery said, in order."""
        poller = select.poll()
        poller.register(self._signals, select.POLLIN)
        if nursery is not None:
            poller.register(nursery, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(LOOK_INTERVAL_S * 1000)}
        events = [_heard(nursery)] if nursery is not None and nursery.fileno() in ready else []
        self.look()
        return events

    def look(self) -> None:
        """What is done after every wait, for one that cannot be here."""
        self.asked += self._signals.take()
        if self.asked and self.asked_s is None:
            self.asked_s = self._clock.monotonic_s()
        self._on_look()


def _heard(nursery: NurseryLink) -> Event:
    message, fds = nursery.receive()
    if message is None:
        return NurseryGone()
    if isinstance(message, Started):
        return Forked(message, tuple(fds))
    if isinstance(message, Ready | RankExit):
        return message
    raise ValueError(f"the agent was sent {message}")
