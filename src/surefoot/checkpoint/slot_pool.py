"""The slots of one rank: the agent's, or its own where there is none. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, MutableMapping, Sequence

from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.core.clock import Clock
from surefoot.core.errors import SurefootError

SLOTS = "SUREFOOT_SLOTS"
"""JSON list of [rank, number, name of the variable that holds the descriptor]."""


def slots_handed_over(environ: MutableMapping[str, str] = os.environ) -> list[Slot]:
    """All slots that the agent handed to this process, its siblings' too; none without an agent.

    Takes the descriptors over: the numbers they came under are closed and their variables gone, so that closing a slot gives its memory
    back, and no child is told a number that means something else there. Raises SurefootError when they were taken before, here or by a
    parent.
    """
    return [_taken_over(environ, name, rank=rank, number=number) for rank, number, name in json.loads(environ.get(SLOTS, "[]"))]


def _taken_over(environ: MutableMapping[str, str], name: str, *, rank: int, number: int) -> Slot:
    if name not in environ:
        raise SurefootError(
            f"slot {number} of rank {rank} is not to be had: it was taken over already",
            where=f"environment, {name}",
            hint=f"one Guard per process, and {SLOTS} must not reach a child",
        )
    fd = int(environ[name])
    slot = Slot.open(fd, rank=rank, number=number)
    del environ[name]
    os.close(fd)
    return slot


class SlotPool:
    """Which slot is filled next. Reused round robin, so the newest commit stays in memory as long as there is another slot."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self._left_out: list[Slot] = []
        self._last: Slot | None = None

    @classmethod
    def create(cls, *, rank: int, num_slots: int) -> SlotPool:
        return cls([Slot.create(rank=rank, number=number) for number in range(num_slots)])

    def free(self, *, but: Collection[Slot] = ()) -> Slot | None:
        """A slot whose bytes nobody needs, none of `but`: best one that holds no commit, then the one that was filled longest ago."""
        usable = [slot for slot in self._after_last() if slot.state().reusable and slot not in but]
        return next((slot for slot in usable if slot.state() is not SlotState.COMMITTED), usable[0] if usable else None)

    def take(self, slot: Slot) -> Slot:
        self._last = slot
        return slot

    def wait_free(self, *, limit_s: float, clock: Clock) -> Slot | None:
        """The first slot that gets free within `limit_s`."""
        deadline_s = clock.monotonic_s() + limit_s
        while (slot := self.free()) is None and clock.monotonic_s() < deadline_s:
            clock.sleep(0.01)
        return slot

    def keep(self, num_slots: int) -> None:
        """Use fewer from now on. Those left out keep what they hold."""
        self._left_out += self.slots[max(1, num_slots) :]
        self.slots = self.slots[: max(1, num_slots)]

    def close(self) -> None:
        close_all(self.slots + self._left_out)
        self.slots, self._left_out = [], []

    def _after_last(self) -> list[Slot]:
        if self._last not in self.slots:
            return self.slots
        next_place = self.slots.index(self._last) + 1
        return self.slots[next_place:] + self.slots[:next_place]


def close_all(slots: Iterable[Slot]) -> None:
    for slot in slots:
        slot.close()
