"""Time as a part that tests can own. Durations come from `monotonic_s`; stamps for people and files are UTC."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def monotonic_s(self) -> float: ...
    def utc(self) -> str: ...
    def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    """The machine's clock. CLOCK_MONOTONIC is shared by all processes of one boot, so beats of several ranks compare."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def utc(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


@dataclass
class ManualClock:
    """A clock that moves only when told to; `sleep` moves it."""

    now_s: float = 0.0
    epoch: datetime = field(default_factory=lambda: datetime(2026, 1, 1, tzinfo=UTC))

    def monotonic_s(self) -> float:
        return self.now_s

    def utc(self) -> str:
        stamp = datetime.fromtimestamp(self.epoch.timestamp() + self.now_s, UTC)
        return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
