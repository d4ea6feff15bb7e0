"""Who says what an agent does next: on one machine a pure policy, on several the coordinator of the job."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from surefoot.coordinate.restart import RestartHistory, decide
from surefoot.core.records import Fault, Instruction
from surefoot.core.sections import LaunchSection
from surefoot.launch.crew import Crew
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
        """The place in the next generation; waits for one, calling `look` a few times per second: it is truthy once this
        machine was asked to leave. None then, and when the job is over."""

    @property
    def is_alone(self) -> bool:
        """Whether this machine has all ranks there can be."""

    def look(self) -> None:
        """What the director has to do a few times per second, whatever the agent does."""

    def begun(self, crew: Crew) -> None:
        """The ranks of the newest berth are forked."""

    def emptied(self) -> None:
        """None of them is left."""

    def called_off(self) -> str | None:
        """Why the generation that runs must end although nothing is lost here: another node is. None while it goes on."""

    def asked_to_leave(self) -> str | None:
        """Why the ranks are to save and leave at a step boundary; None while they are not."""

    def leave(self, reason: str) -> None:
        """This machine was asked to go; said as often as one likes."""

    def lost(self, fault: Fault) -> None:
        """A rank here is lost: said before the evidence and the kill."""

    def ended(self, fault: Fault, *, look: Callable[[], object]) -> Instruction:
        """What to do about a generation that ended with this fault. May wait, calling `look`."""

    def over(self, outcome: Literal["finished", "left"], *, look: Callable[[], object]) -> Instruction | None:
        """What to do when the ranks have ended in good order, or had no place; None: what they ended with is what the agent ends with."""

    def close(self) -> None:
        """The agent ends."""


class LocalDirector:
    """One machine: all ranks are here. `history` is what the run has used before this agent; without one the budget begins anew."""

    def __init__(self, limits: LaunchSection, *, num_ranks: int, counters: Counters, history: RestartHistory | None = None) -> None:
        self._limits = limits
        self._num_ranks = num_ranks
        self._next_generation = counters.generation + 1
        self._history = history or RestartHistory(newest_step=counters.step)

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

    @property
    def is_alone(self) -> bool:
        return True

    def look(self) -> None:
        pass

    def begun(self, crew: Crew) -> None:
        pass

    def emptied(self) -> None:
        pass

    def called_off(self) -> str | None:
        return None

    def asked_to_leave(self) -> str | None:
        return None

    def leave(self, reason: str) -> None:
        pass

    def lost(self, fault: Fault) -> None:
        pass

    def over(self, outcome: Literal["finished", "left"], *, look: Callable[[], object]) -> Instruction | None:
        return None

    def close(self) -> None:
        pass

    def ended(self, fault: Fault, *, look: Callable[[], object] = lambda: None) -> Instruction:
        instruction, self._history = decide(self._history, fault, self._limits, draw=random.random())
        return instruction
