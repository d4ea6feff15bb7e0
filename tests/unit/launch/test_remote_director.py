"""The director of a node against a coordinator of the test's own: a real socket, a real link, and a word only when the test says one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from surefoot.coordinate.beats import BeatBoard
from surefoot.coordinate.members import MemberLimits
from surefoot.coordinate.world_sizes import WorldSize
from surefoot.core.clock import SystemClock
from surefoot.core.holder import this_process
from surefoot.core.records import Fault, Grade, Instruction
from surefoot.core.sections import LaunchSection, ParallelSection
from surefoot.launch.coordinator_claim import write_contact
from surefoot.launch.coordinator_settings import CoordinatorSettings
from surefoot.launch.coordinator_wire import (
    Beat,
    BerthGiven,
    Contact,
    Ended,
    FaultSeen,
    Hello,
    Instruct,
    Join,
    Leave,
    Lines,
    Message,
    Ready,
    Refused,
    Stop,
    Welcome,
    decode,
    encode,
)
from surefoot.launch.crew import Crew
from surefoot.launch.director import Berth
from surefoot.launch.node import NodeIdentity
from surefoot.launch.node_coordinator import CoordinatorKeeper
from surefoot.launch.node_link import NodeLink
from surefoot.launch.remote_director import RemoteDirector

M = TypeVar("M", bound=Message)
T = TypeVar("T")
LIMIT_S = 20.0  # against a hang
ANSWER_LIMIT_S = 15.0
LAST_WORD_S = 0.3
ME = NodeIdentity("n1-boot", "n1", "n1", "127.0.0.1")
FAULT = Fault("rank", "rank 0 was killed by SIGKILL", 0, None, 9, 7, 1.0)
LEAVES = Leave(ME.node, "SIGTERM")


class OpenCoordinator:
    """Takes one connection at a time and keeps what it hears, in order; says what the test says."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(LIMIT_S)
        self.told: list[Message] = []
        self.channel: socket.socket | None = None
        self.be_there(epoch=1)

    def be_there(self, *, epoch: int, pid: int | None = None) -> None:
        port = self.listener.getsockname()[1]
        pid = os.getpid() if pid is None else pid
        write_contact(self.run_dir, Contact("run", "127.0.0.1", port, "token", epoch, pid, this_process().boot_id))

    def take_connection(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.channel, _ = self.listener.accept()
        self.channel.settimeout(LIMIT_S)
        self._lines = Lines()
        self.say(Welcome("run", 1, 0.2, 3.0, 5.0))

    def say(self, *messages: Message) -> None:
        assert self.channel is not None
        self.channel.sendall(b"".join(encode(message) for message in messages))

    def hear(self, kind: type[M]) -> M:
        """The next of its kind that was not heard yet."""
        assert self.channel is not None
        while not (found := [message for message in self.told if isinstance(message, kind)]):
            data = self.channel.recv(1 << 16)
            assert data, f"the node hung up; it said {self.told}"
            self.told += [message for line in self._lines.feed(data) if not isinstance(message := decode(line), Beat)]
        self.told.remove(found[0])
        return found[0]

    def be_gone(self) -> None:
        """As one that was killed: the process that its file names is not there, and nobody listens."""
        gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
        gone.wait()
        self.be_there(epoch=1, pid=gone.pid)
        self.close()

    def close(self) -> None:
        self.listener.close()
        if self.channel is not None:
            self.channel.close()


class Node:
    """A director on a link of its own. `is_asked` is the wish to leave, which the agent's look passes on."""

    def __init__(self, run_dir: Path) -> None:
        self.clock = SystemClock()
        self.is_asked = threading.Event()
        limits = LaunchSection(beat_s=0.1, dead_s=5.0)
        settings = CoordinatorSettings("run", "job", MemberLimits(1, 2, 1), beat_s=0.1, idle_s=3.0)
        self.link = NodeLink(run_dir, ME, limits=limits, capacity=1, clock=self.clock)
        self.director = RemoteDirector(
            self.link,
            CoordinatorKeeper(run_dir, settings, clock=self.clock),
            ranks_per_node=1,
            sizes={count: WorldSize(count, count, ParallelSection(dp_replicate=count), "") for count in (1, 2)},
            clock=self.clock,
            answer_limit_s=ANSWER_LIMIT_S,
            last_word_s=LAST_WORD_S,
            say=lambda line: None,
        )

    def look(self) -> bool:
        """As the agent's: it passes the wish on and looks after the director."""
        if self.is_asked.is_set():
            self.director.leave(LEAVES.reason)
        self.director.look()
        return self.is_asked.is_set()


class Asked(Generic[T]):
    """A question to the director, in a thread: the test is the coordinator meanwhile."""

    def __init__(self, question: Callable[[], T]) -> None:
        self.answers: list[T] = []
        self.thread = threading.Thread(target=lambda: self.answers.append(question()), daemon=True)
        self.thread.start()

    def answer(self, *, within_s: float = LIMIT_S) -> T:
        self.thread.join(within_s)
        assert self.answers, f"no answer within {within_s:g} s"
        return self.answers[0]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[OpenCoordinator]:
    opened = OpenCoordinator(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def node(coordinator: OpenCoordinator) -> Iterator[Node]:
    made = Node(coordinator.run_dir)
    coordinator.take_connection()
    yield made
    made.director.close()


def given(generation: int, *, first_rank: int = 0) -> BerthGiven:
    return BerthGiven(ME.node, generation, 0, 2, first_rank, 1, "127.0.0.1", 1000, first_rank, 2)


def seated(coordinator: OpenCoordinator, node: Node, *, generation: int = 4, first_rank: int = 0) -> Berth:
    """The node has a place, and its ranks have begun."""
    asked = Asked(lambda: node.director.berth(look=node.look))
    coordinator.hear(Ready)
    coordinator.say(given(generation, first_rank=first_rank))
    berth = asked.answer()
    assert berth is not None
    return berth


@pytest.fixture
def crew_of(node: Node) -> Iterator[Callable[[int], Crew]]:
    made: list[Crew] = []

    def make(generation: int) -> Crew:
        life_fd, ranks_life_fd = os.pipe()
        os.close(ranks_life_fd)
        board = BeatBoard.create(1, first_rank=0, generation=generation, clock=node.clock)
        made.append(Crew(board, life_fd=life_fd, clock=node.clock))
        return made[-1]

    yield make
    node.director.emptied()
    for crew in made:
        crew.close()


def test_the_place_is_the_coordinators_and_the_port_is_bound_where_rank_0_is(coordinator: OpenCoordinator, node: Node) -> None:
    asked = Asked(lambda: node.director.berth(look=node.look))
    port = coordinator.hear(Ready).port
    coordinator.say(given(0), given(4))  # the first is of no newer generation than its own: it is nobody's place
    berth = asked.answer()
    assert berth is not None
    assert (berth.generation, berth.world_size, berth.first_rank, berth.num_nodes) == (4, 2, 0, 2)
    assert berth.listener is not None
    with berth.listener:
        assert berth.listener.getsockname()[1] == port
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_node_without_rank_0_keeps_no_port(coordinator: OpenCoordinator, node: Node) -> None:
    assert seated(coordinator, node, first_rank=1).listener is None


def test_ranks_are_called_off_by_a_word_about_their_generation_alone(coordinator: OpenCoordinator, node: Node) -> None:
    with seated(coordinator, node).listener or socket.socket():
        coordinator.say(Stop(ME.node, 3, "of another generation"), Stop(ME.node, 4, "node n2 leaves", in_order=True))
        while node.director.asked_to_leave() is None:
            assert node.director.called_off() is None
        assert node.director.asked_to_leave() == "node n2 leaves"
        coordinator.say(Stop(ME.node, 4, "node n2 is gone"))
        while (reason := node.director.called_off()) is None:
            time.sleep(0.01)
        assert reason == "node n2 is gone"


def test_a_fault_is_told_at_once_and_the_answer_to_its_end_is_the_coordinators(coordinator: OpenCoordinator, node: Node) -> None:
    with seated(coordinator, node).listener or socket.socket():
        node.director.lost(FAULT)
        assert coordinator.hear(FaultSeen).fault["reason"] == FAULT.reason
        asked = Asked(lambda: node.director.ended(FAULT, look=node.look))
        ended = coordinator.hear(Ended)
        assert (ended.generation, ended.outcome, ended.fault["signal"]) == (4, "failed", 9)
        coordinator.say(Instruct(ME.node, 3, "stop", "of another generation", "node", 93))
        coordinator.say(Instruct(ME.node, 4, "restart", "a node is gone", "node", wait_s=9.0))
        instruction = asked.answer()
        assert instruction == Instruction("restart", "a node is gone", Grade.NODE)  # it waits for a place: the coordinator has the clock


def test_ranks_that_were_called_off_have_no_fault_of_their_own(coordinator: OpenCoordinator, node: Node) -> None:
    with seated(coordinator, node).listener or socket.socket():
        coordinator.say(Stop(ME.node, 4, "node n2 is gone"))
        while node.director.called_off() is None:
            time.sleep(0.01)
        asked = Asked(lambda: node.director.ended(FAULT, look=node.look))
        ended = coordinator.hear(Ended)
        assert (ended.outcome, ended.fault) == ("stopped", {})
        coordinator.say(Refused(ME.node, 4, "its ranks are counted as gone"))
        instruction = asked.answer()
        assert (instruction.kind, instruction.grade) == ("restart", Grade.NODE)


def test_a_wish_to_leave_ends_the_wait_for_a_place(coordinator: OpenCoordinator, node: Node) -> None:
    asked = Asked(lambda: node.director.berth(look=node.look))
    coordinator.hear(Ready)
    node.is_asked.set()
    assert coordinator.hear(Leave) == LEAVES
    assert asked.answer(within_s=2.0) is None
    instruction = node.director.over("left", look=node.look)
    assert (instruction.kind, instruction.exit_code) == ("stop", 75)


def test_a_node_that_goes_is_never_ready_again(coordinator: OpenCoordinator, node: Node) -> None:
    coordinator.hear(Join)
    node.is_asked.set()
    assert node.director.berth(look=node.look) is None
    assert coordinator.hear(Leave) == LEAVES
    coordinator.take_connection()  # cut: the word may have been lost
    assert coordinator.hear(Leave) == LEAVES
    assert [type(message) for message in coordinator.told if not isinstance(message, Hello | Join)] == []


def test_a_wish_to_leave_ends_the_wait_for_an_answer(coordinator: OpenCoordinator, node: Node) -> None:
    with seated(coordinator, node).listener or socket.socket():
        asked = Asked(lambda: node.director.ended(FAULT, look=node.look))
        coordinator.hear(Ended)
        node.is_asked.set()
        instruction = asked.answer(within_s=5.0)
        assert (instruction.kind, instruction.exit_code) == ("stop", 75)


def test_what_the_coordinator_says_to_a_node_that_goes_still_counts(coordinator: OpenCoordinator, node: Node) -> None:
    with seated(coordinator, node).listener or socket.socket():
        node.is_asked.set()
        asked = Asked(lambda: node.director.ended(FAULT, look=node.look))
        coordinator.hear(Ended)
        coordinator.say(Instruct(ME.node, 4, "stop", "it makes no progress", "deterministic", 93))
        instruction = asked.answer()
        assert instruction.exit_code == 93


def test_a_node_that_is_asked_to_leave_before_it_starts_again_waits_for_no_answer(coordinator: OpenCoordinator, node: Node) -> None:
    with seated(coordinator, node).listener or socket.socket():
        asked = Asked(lambda: node.director.ended(FAULT, look=node.look))
        coordinator.hear(Ended)
        coordinator.say(Instruct(ME.node, 4, "restart", "a node is gone", "node"))
        asked.answer()
        node.is_asked.set()  # while the agent waits, or warms its nursery up
        instruction = Asked(lambda: node.director.over("left", look=node.look)).answer(within_s=2.0)
        assert (instruction.kind, instruction.exit_code) == ("stop", 75)


def test_a_node_that_goes_starts_no_coordinator(coordinator: OpenCoordinator, node: Node) -> None:
    with seated(coordinator, node).listener or socket.socket():
        node.is_asked.set()
        coordinator.be_gone()
        asked = Asked(lambda: node.director.ended(FAULT, look=node.look))
        instruction = asked.answer(within_s=5.0)
        assert (instruction.kind, instruction.exit_code) == ("stop", 75)
        while node.link.lost_for_s < 0.2:
            node.look()
        assert not (coordinator.run_dir / "logs").exists()


def test_how_the_ranks_ended_comes_first_on_a_new_connection(
    coordinator: OpenCoordinator, node: Node, crew_of: Callable[[int], Crew]
) -> None:
    with seated(coordinator, node).listener or socket.socket():
        node.director.begun(crew_of(4))
        node.director.emptied()
        coordinator.told.clear()
        coordinator.take_connection()
        assert coordinator.hear(Join).generation == 4  # no word yet of how they ended: it was not started anew
        asked = Asked(lambda: node.director.over("finished", look=node.look))
        coordinator.hear(Ended)
        coordinator.told.clear()
        coordinator.take_connection()
        assert coordinator.hear(Join).generation == 0
        assert isinstance(coordinator.told[-1], Ended)
        coordinator.say(Instruct(ME.node, 4, "stop", "the run is finished", "planned"))
        instruction = asked.answer()
        assert (instruction.kind, instruction.exit_code) == ("stop", 0)
