"""What was added to a ledger since the last look: for a process that looks often and must not read a long ledger again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from surefoot.core.clock import Clock
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger_lines import decode, entry_of


class LedgerTail:
    """The entries of some `events`, each once, in their order; the first look reads the ledger from its start.

    `news` asks the file for its size at most every `look_every_s`, and reads only when it has grown; other entries are not even parsed.
    """

    def __init__(self, path: Path, *, events: Iterable[Event], clock: Clock, look_every_s: float) -> None:
        self._path = path
        self._events = frozenset(event.value for event in events)
        self._marks = tuple(f'"event":"{event}"'.encode() for event in self._events)
        self._clock = clock
        self._look_every_s = look_every_s
        self._looked_s = float("-inf")
        self._offset = 0

    def news(self, *, now: bool = False) -> list[LedgerEntry]:
        """What has come since the last call; `now` looks although the last look was a moment ago. A torn last line is left for later.

        Raises OSError when the file is there and cannot be read; the next call begins where this one did.
        """
        now_s = self._clock.monotonic_s()
        if not now and now_s - self._looked_s < self._look_every_s:
            return []
        self._looked_s = now_s
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = [line for line in whole.splitlines(keepends=True) if any(mark in line for mark in self._marks)]
        return [entry_of(raw) for line in lines if (raw := decode(line)) is not None and raw["event"] in self._events]
