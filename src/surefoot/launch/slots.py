"""The memory in which ranks keep host copies of what they save: the agent's, so it outlives every rank. Only its bounds are known here.

What lies in it is laid out and read by `checkpoint.slot`: fresh memory is empty, and whoever opens it first makes it a slot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError
from surefoot.launch.wire import MAX_FDS

SLOTS = "SUREFOOT_SLOTS"
_FDS_OF_A_START = 3  # listening socket, beats, life pipe


@dataclass(frozen=True, slots=True)
class SlotFd:
    rank: int
    number: int
    fd: int

    @property
    def variable(self) -> str:
        """Of the environment: holds the number that the descriptor has in whatever process it was handed to."""
        return f"SUREFOOT_SLOT_{self.rank}_{self.number}"


class SlotMemory:
    """One memfd per slot of every rank, of no bytes until a rank fills it. Closed on exec unless handed on by name."""

    def __init__(self, slots: tuple[SlotFd, ...]) -> None:
        self.slots = slots

    @classmethod
    def create(cls, *, num_ranks: int, num_slots: int) -> SlotMemory:
        """Raises ConfigError when so many cannot be handed to a rank."""
        if (limit := MAX_FDS - _FDS_OF_A_START) < num_ranks * num_slots:
            raise ConfigError(
                f"{num_ranks} ranks with {num_slots} slots each: one machine can hand on {limit}",
                where="[checkpoint] num_slots",
                hint='fewer slots, or `tiers = ["disk"]`',
                got=num_ranks * num_slots,
                limit=limit,
            )
        places = [(rank, number) for rank in range(num_ranks) for number in range(num_slots)]
        return cls(tuple(SlotFd(rank, number, os.memfd_create(f"surefoot-slot-{rank}-{number}")) for rank, number in places))

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(slot.fd for slot in self.slots)

    def rank_env(self) -> Mapping[str, str]:
        """What a rank reads first: rank, number and variable of each."""
        return {SLOTS: strict_json.dumps([[slot.rank, slot.number, slot.variable] for slot in self.slots])}

    def rank_fds(self, *, first: int) -> Mapping[str, int]:
        """For `Start.fds`, when the descriptors are sent along from place `first` on."""
        return {slot.variable: first + index for index, slot in enumerate(self.slots)}

    def child_env(self) -> Mapping[str, str]:
        """For a child that is exec'ed with `pass_fds`: there the numbers are the ones that they are here."""
        return {**self.rank_env(), **{slot.variable: str(slot.fd) for slot in self.slots}}

    def close(self) -> None:
        for slot in self.slots:
            os.close(slot.fd)
