"""Who says what an agent does next: on one machine a pure policy, on several the coordinator of the job."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from surefoot.coordinate.restart import RestartHistory, decide
from surefoot.core.records import Fault, Instruction
from surefoot.core.sections import LaunchSection
from surefoot.launch.rendezvous import LOCALHOST, open_listener
from surefoot.observe.lineage import Counters


@dataclass(frozen=True, slots=True)
class Berth:
    """This node's place in one generation of ranks: `num_local_ranks` of `world_size`, from `first_rank` on.

    `listener` is the bound socket behind `master_addr` and `master_port`, on the node that has rank 0; whoever takes the berth closes it.
    `env` is added to the environment of every rank.
    """

    generation: int
    num_restarts: int
    world_size: int
    first_rank: int
    num_local_ranks: int
    master_addr: str
    master_port: int
    listener: socket.socket | None = None
    node_rank: int = 0
    num_nodes: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        """Whether rank 0 is here, and with it the lock and the ledger."""
        return self.first_rank == 0


class Director(Protocol):
    """Asked by the agent in its one thread. None of it blocks for longer than it calls `look`."""

    @property
    def num_local_ranks(self) -> int:
        """How many ranks this node ever has: its memory is laid out for them."""

    def berth(self, *, look: Callable[[], object]) -> Berth | None:
        """The place in the next generation; waits for one, calling `look` a few times per second. None when it was asked to leave."""

    def called_off(self) -> str | None:
        """Why the generation that runs must end although nothing is lost here: another node is. None while it goes on."""

    def ended(self, fault: Fault) -> Instruction:
        """What to do about a generation that ended with this fault."""


class LocalDirector:
    """One machine: all ranks are here, and the budget is this agent's."""

    def __init__(self, limits: LaunchSection, *, num_ranks: int, counters: Counters) -> None:
        self._limits = limits
        self._num_ranks = num_ranks
        self._next_generation = counters.generation + 1
        self._history = RestartHistory(newest_step=counters.step)

    @property
    def num_local_ranks(self) -> int:
        return self._num_ranks

    def berth(self, *, look: Callable[[], object]) -> Berth | None:
        listener = open_listener(num_ranks=self._num_ranks)
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        return Berth(
            generation=generation,
            num_restarts=self._history.num_restarts,
            world_size=self._num_ranks,
            first_rank=0,
            num_local_ranks=self._num_ranks,
            master_addr=LOCALHOST,
            master_port=listener.getsockname()[1],
            listener=listener,
        )

    def called_off(self) -> str | None:
        return None

    def ended(self, fault: Fault) -> Instruction:
        instruction, self._history = decide(self._history, fault, self._limits)
        return instruction
