"""The director of one node among several: the coordinator of the job decides, over the wire. See `director.Director`.

What an agent asks is said to the coordinator, and said again on every new connection until it is answered; a coordinator that is gone is
waited for, and this node starts a new one when it is its turn. A node without a place waits here, however long that takes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Literal

from surefoot.coordinate.world_sizes import WorldSize
from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.core.errors import EXIT_RETRY
from surefoot.core.records import Fault, Grade, Instruction
from surefoot.launch.coordinator_wire import BerthGiven, Drain, Ended, FaultSeen, Instruct, Message, Refused, Seated, Stop
from surefoot.launch.crew import Crew
from surefoot.launch.director import Berth
from surefoot.launch.node import interface_of
from surefoot.launch.node_coordinator import CoordinatorKeeper
from surefoot.launch.node_link import NodeLink, Running
from surefoot.launch.rendezvous import PARALLEL, open_listener
from surefoot.observe.drains import DrainTail

logger = logging.getLogger(__name__)

_WAIT_S = 0.1
_LAST_WORD_S = 5.0

Outcome = Literal["finished", "left", "failed", "stopped"]


class RemoteDirector:
    """`sizes` are the layouts by number of nodes; `answer_limit_s` bounds the wait for a decision about a generation that ended, and
    `last_word_s` what is left of it once this node goes."""

    def __init__(
        self,
        link: NodeLink,
        keeper: CoordinatorKeeper,
        *,
        ranks_per_node: int,
        sizes: Mapping[int, WorldSize],
        clock: Clock,
        answer_limit_s: float,
        last_word_s: float = _LAST_WORD_S,
        say: Callable[[str], None],
        drains: DrainTail | None = None,
    ) -> None:
        self._link, self._keeper, self._clock, self._say = link, keeper, clock, say
        self._ranks_per_node, self._sizes = ranks_per_node, sizes
        self._answer_limit_s, self._last_word_s = answer_limit_s, last_word_s
        self._generation, self._node_rank = 0, 0
        self._drains = drains
        self._called_off: str | None = None
        self._asked_to_leave: str | None = None
        self._over: Instruction | None = None
        self._leaving = self._seated = False

    @property
    def num_local_ranks(self) -> int:
        return self._ranks_per_node

    @property
    def is_alone(self) -> bool:
        return False

    def look(self) -> None:
        """A few times per second, whatever the agent does: the coordinator is looked after.

        A node that goes, or whose job is over, starts no new one: nobody would end it. Ranks that run need one to leave in good order.
        """
        if not self._seated and (self._leaving or self._over is not None):
            return
        self._keeper.look(lost_for_s=self._link.lost_for_s, node_rank=self._node_rank, generation=self._generation)

    def berth(self, *, look: Callable[[], object]) -> Berth | None:
        """`look` is truthy when this node was asked to leave. None, too, when the coordinator says that the job is over."""
        self._called_off = self._asked_to_leave = None
        if look() or self._leaving:
            self._go_without_place()  # before it says that it is ready: a node that goes would be given a place
            return None
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(open_listener(num_ranks=self._ranks_per_node * max(self._sizes), address=self._link.me.address))
            self._link.be_ready(listener.getsockname()[1])
            while True:
                if look():
                    self._go_without_place()
                    return None
                self.look()
                word = self._link.take(wait_s=_WAIT_S)
                if isinstance(word, BerthGiven) and word.generation > self._generation:
                    leads = word.first_rank == 0
                    if leads:
                        stack.pop_all()  # whoever takes the berth closes it
                    return self._berth(word, listener if leads else None)
                if isinstance(word, Instruct) and word.action == "stop" and word.generation >= self._generation:
                    self._over = _instruction(word)
                    return None
                self._note(word)

    def _go_without_place(self) -> None:
        self.leave("asked to leave before there was a place for its ranks")
        self._link.flush(limit_s=self._last_word_s)

    def begun(self, crew: Crew) -> None:
        """The ranks of the newest berth are forked: the link beats for them, and kills them when nobody hears it."""
        self._link.begin(Running(crew.generation, crew.kill, crew.step))

    def emptied(self) -> None:
        """None of them is left."""
        self._link.end()

    def called_off(self) -> str | None:
        while (word := self._link.take()) is not None:
            self._note(word)
        self._hand_on_drains()
        return self._link.fenced or self._called_off

    def _hand_on_drains(self) -> None:
        """What a person asked for and the ranks took: one node says it to the coordinator, which has the ranks leave at a step boundary."""
        with contextlib.suppress(OSError):  # a look that failed is made again
            for drain in self._drains.news() if self._drains is not None else ():
                if self._node_rank == 0:
                    self._link.say(Drain(drain.node, drain.reason, drain.by))

    def asked_to_leave(self) -> str | None:
        """Why the ranks are to save and leave at a step boundary; None while they are not."""
        return self._asked_to_leave

    def leave(self, reason: str) -> None:
        """This node goes; said once."""
        if not self._leaving:
            self._leaving = True
            self._link.be_gone(reason)

    def lost(self, fault: Fault) -> None:
        """Said at once, before the evidence and the kill: the other nodes need not wait for them."""
        self._link.say(FaultSeen(self._link.me.node, self._generation, _as_json(fault)))

    def ended(self, fault: Fault, *, look: Callable[[], object] = lambda: None) -> Instruction:
        """No rank is left here. The coordinator's decision about the whole generation."""
        stopped = self._called_off is not None or bool(self._link.fenced)
        return self._answer("stopped" if stopped else "failed", None if stopped else fault, look)

    def over(self, outcome: Literal["finished", "left"], *, look: Callable[[], object]) -> Instruction:
        """The ranks ended in good order. Others may go on: then this node does, too, unless it was the one that was asked to go."""
        if not self._seated:
            return self._over or Instruction("stop", "it leaves as it was asked", Grade.PLANNED, exit_code=EXIT_RETRY)
        return self._answer(outcome, None, look)

    def close(self) -> None:
        self._link.flush(limit_s=self._last_word_s)
        self._link.close()

    def _answer(self, outcome: Outcome, fault: Fault | None, look: Callable[[], object]) -> Instruction:
        """No rank is left here, so this node has no seat any more, whatever the answer is."""
        self._seated = False
        instruction = self._await_word(Ended(self._link.me.node, self._generation, outcome, _as_json(fault) if fault else {}), look)
        if instruction is None and self._leaving:
            instruction = Instruction("stop", "it leaves as it was asked", Grade.PLANNED, exit_code=EXIT_RETRY)
        elif instruction is None and outcome == "finished":
            instruction = Instruction("stop", "the ranks are done; the coordinator did not answer", Grade.PLANNED)
        elif instruction is None:
            waited = f"the coordinator did not answer within {self._answer_limit_s:g} s"
            instruction = Instruction("restart", f"{waited}: waiting for a place", Grade.NODE)
        if instruction.kind == "stop":
            self._over = instruction
        return instruction

    def _await_word(self, ended: Ended, look: Callable[[], object]) -> Instruction | None:
        """The coordinator's word about the generation that ended; None when none came in time. A wish to leave shortens the wait."""
        self._link.be_done(ended)
        until_s = self._clock.monotonic_s() + self._answer_limit_s
        was_leaving = False
        while self._clock.monotonic_s() < until_s:
            look()
            self.look()
            if self._leaving and not was_leaving:
                was_leaving, until_s = True, min(until_s, self._clock.monotonic_s() + self._last_word_s)
            word = self._link.take(wait_s=_WAIT_S)
            if isinstance(word, Instruct) and word.generation == self._generation:
                return _instruction(word)
            if isinstance(word, Refused) and word.generation <= self._generation:
                return None if self._leaving else Instruction("restart", f"this node waits for a place: {word.reason}", Grade.NODE)
            self._note(word)
        return None

    def _note(self, word: Message | None) -> None:
        if isinstance(word, Stop) and word.generation == self._generation:
            if word.in_order:
                self._asked_to_leave = word.reason
            else:
                self._called_off = word.reason
        elif isinstance(word, Refused):
            if word.generation == self._generation or not self._generation:
                self._called_off = f"refused by the coordinator: {word.reason}"
            logger.warning("refused by the coordinator: %s", word.reason)
        elif isinstance(word, Seated):
            self._say(f"node {self._link.me.name} is {word.state}: {word.reason}")

    def _berth(self, word: BerthGiven, listener: socket.socket | None) -> Berth:
        self._generation, self._node_rank, self._seated = word.generation, word.node_rank, True
        size = self._sizes[word.num_nodes]
        assert size.parallel is not None  # the coordinator has the same list of legal numbers
        env = {PARALLEL: strict_json.dumps(asdict(size.parallel))}
        if interface := interface_of(self._link.me.address):
            env["GLOO_SOCKET_IFNAME"] = interface
        self._say(f"generation {word.generation}: node {word.node_rank} of {word.num_nodes}, {size.reason} ({word.reason})")
        return Berth(
            generation=word.generation,
            num_restarts=word.num_restarts,
            world_size=word.world_size,
            first_rank=word.first_rank,
            num_local_ranks=word.num_local_ranks,
            master_addr=word.master_addr,
            master_port=word.master_port,
            listener=listener,
            node_rank=word.node_rank,
            num_nodes=word.num_nodes,
            env=env,
        )


def _instruction(word: Instruct) -> Instruction:
    """The wait before a restart is the coordinator's: no berth is given before it is over."""
    return Instruction(word.action, word.reason, Grade(word.grade), exit_code=word.exit_code)


def _as_json(fault: Fault) -> dict[str, object]:
    return asdict(fault)
