"""Where the loop of this process says that it moves. Without an agent nobody watches, and none of it does anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.coordinate.beats import BeatSlot
from surefoot.core.records import Phase
from surefoot.tensors.world import Exchanges


class Watched:
    """A process is one rank of one generation, so it has one slot."""

    slot: BeatSlot | None = None


def be_watched(slot: BeatSlot) -> None:
    """Local. From now on micro-steps, phases and the exchanges of the main thread are beats in `slot`."""
    Watched.slot = slot
    Exchanges.tell = slot.enter


def beat_micro_step(micro_step: int) -> None:
    """Local. One begins; below a microsecond."""
    if Watched.slot is not None:
        Watched.slot.beat(micro_step=micro_step)


@contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """Local. What is done meanwhile may take as long as that phase; then the former one goes on."""
    slot = Watched.slot
    if slot is None:
        yield
        return
    former = slot.phase
    slot.beat(phase=phase)
    yield
    slot.beat(phase=former)  # not after an error: the phase that it came from is worth knowing
