"""The memory that saves are copied into: how many copies of the state fit, taken in time, and which one is filled next."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection

from surefoot.checkpoint.memory_limit import memory_limit, slots_that_fit
from surefoot.checkpoint.save_plan import PlannedSave
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.slot_pool import SlotPool, close_all, slots_handed_over
from surefoot.core.clock import Clock
from surefoot.core.errors import ConfigError
from surefoot.core.sections import CheckpointSection
from surefoot.guard.recording import Recorder
from surefoot.tensors.world import World, agree_ok, gather_json

logger = logging.getLogger(__name__)

_INDEX_ROOM_BYTES = 1 << 20


class HostCopies:
    """The slots of this rank, the agent's or its own, and until `close_siblings` those of the other ranks of this machine."""

    def __init__(self, section: CheckpointSection, *, world: World, recorder: Recorder) -> None:
        self._section = section
        self._world = world
        self._recorder = recorder
        self._fitted: PlannedSave | None = None
        self._reserving: threading.Thread | None = None
        handed_over = slots_handed_over()
        self._siblings = [slot for slot in handed_over if slot.rank != world.rank]
        own = [slot for slot in handed_over if slot.rank == world.rank]
        self.are_the_agents = bool(own)
        self._pool = SlotPool(own) if own else SlotPool.create(rank=world.rank, num_slots=section.num_slots)

    @property
    def own(self) -> list[Slot]:
        return self._pool.slots

    @property
    def all(self) -> list[Slot]:
        """This rank's, and those of its siblings until `close_siblings`: what an agent kept over a restart."""
        return [*self._pool.slots, *self._siblings]

    def close_siblings(self) -> None:
        close_all(self._siblings)
        self._siblings = []

    def fit(self, planned: PlannedSave, *, may_reserve: bool) -> None:
        """Collective over the save group where the plan is a new one. How many slots there may be.

        With `may_reserve`, while nothing is in them, their memory is taken beside the loop. All ranks raise ConfigError when not even one
        host copy fits.
        """
        if planned is self._fitted:
            return
        num_bytes = planned.image.num_bytes + _INDEX_ROOM_BYTES
        fit, refused = 0, None
        try:
            fit = slots_that_fit(
                num_bytes,
                wanted=self._section.num_slots,
                local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", self._world.size)),
                fraction=self._section.host_fraction,
                limit=memory_limit(),
            )
        except ConfigError as error:
            refused = error
        if (agreed := agree_ok(self._world, refused)) is not None:
            raise agreed
        num_slots = min(gather_json(self._world, fit))
        if num_slots < len(self._pool.slots):
            self._recorder.say(f"note: {num_slots} host copies per rank instead of {len(self._pool.slots)}: more do not fit into memory")
            self._pool.keep(num_slots)
        self._fitted = planned
        if may_reserve and self._reserving is None:
            self._reserving = threading.Thread(target=self._reserve, args=(num_bytes,), name="surefoot-reserve", daemon=True)
            self._reserving.start()

    def await_reserved(self) -> None:
        """Before a slot is filled."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def free(self, *, but: Collection[Slot]) -> Slot | None:
        return self._pool.free(but=but)

    def take(self, slot: Slot) -> Slot:
        return self._pool.take(slot)

    def wait_free(self, *, limit_s: float, clock: Clock) -> None:
        self._pool.wait_free(limit_s=limit_s, clock=clock)

    def close(self) -> None:
        self.await_reserved()
        self.close_siblings()
        self._pool.close()

    def _reserve(self, num_bytes: int) -> None:
        try:
            for slot in self._pool.slots:
                slot.reserve(num_bytes)
        except OSError as error:
            logger.warning("host memory for saves could not be taken yet: %s", error)  # the save itself will say so
