"""Records of saves: one that is under way, what a rank says of it to the others, and how many have failed."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.staging import Snapshot
from surefoot.core.errors import SurefootError
from surefoot.monitor.vector import SaveState


@dataclass(frozen=True, slots=True)
class SaveWords:
    """What this rank says about saves in the vector of a step. `wants_save` asks for one."""

    point: int
    state: SaveState
    slot_free: bool
    wants_save: bool


@dataclass(slots=True)
class UnderWay:
    """A save whose outcome is not agreed on. Without a slot it failed before one was filled; `error` says why."""

    id: str
    step: int
    point: int
    reason: str
    began_s: float
    slot: Slot | None = None
    snapshot: Snapshot | None = None
    error: SurefootError | None = None


class Failures:
    """Counts of failed saves: tries of the present point, and points in a row. `again` is why there is to be another try."""

    def __init__(self, max_tries: int, *, began_s: float) -> None:
        self._max_tries = max_tries
        self.tries = 0
        self.points = 0
        self.again: str | None = None
        self.last_success_s = began_s

    def one(self, reason: str) -> None:
        self.tries += 1
        self.again = reason
        if self.tries >= self._max_tries:
            self.tries, self.again = 0, None
            self.points += 1

    def none(self, *, now_s: float) -> None:
        self.tries, self.points, self.again, self.last_success_s = 0, 0, None, now_s

    def forget(self) -> None:
        self.tries, self.again = 0, None
