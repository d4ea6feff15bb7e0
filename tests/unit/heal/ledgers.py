"""Ledger entries as the parts of a run write them, made up one by one."""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry

EPOCH_S = ManualClock().epoch.timestamp()


class Story:
    """`tell` adds an entry `after_s` seconds later. Each is as large as a ledger's, its chain of hashes apart."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        self.clock = ManualClock()
        self.attempt = self.generation = 1

    @property
    def now_s(self) -> float:
        return EPOCH_S + self.clock.now_s

    def tell(
        self,
        event: Event,
        *,
        step: int = 0,
        rule: str = "",
        reason: str = "",
        after_s: float = 0.0,
        fields: Mapping[str, object] | None = None,
    ) -> LedgerEntry:
        self.clock.sleep(after_s)
        seq = len(self.entries) + 1
        known = (self.generation, self.attempt, step, event.value, "rank 0", rule, reason, dict(fields or {}))
        self.entries.append(LedgerEntry(seq, self.clock.utc(), *known, prev="", hash=""))
        return self.entries[-1]

    def found(
        self, rule: str, *, step: int, asks: str = "skip", onset: int | None = None, after_s: float = 0.0, **more: object
    ) -> LedgerEntry:
        """A finding about `step`, written while the step before it is the last finished one."""
        fields = {"of_step": step, "rule": rule, "asks": asks, "onset_step": onset or step, "evidence": {}, "action": "skipupdate", **more}
        return self.tell(Event.ANOMALY_FOUND, step=step - 1, rule=rule, reason=f"{rule} fired", after_s=after_s, fields=fields)
