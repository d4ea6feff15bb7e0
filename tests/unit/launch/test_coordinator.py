"""The coordinator as a process: real sockets, real kills. Leases are short here; how soon a death is seen, its benchmark says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.coordinate.members import MemberLimits
from surefoot.coordinate.silence import SilenceLimits
from surefoot.launch.coordinator_claim import journal_path
from surefoot.launch.coordinator_settings import CoordinatorSettings, start_coordinator
from surefoot.launch.coordinator_wire import (
    MAX_LINE_BYTES,
    Beat,
    BerthGiven,
    Contact,
    Drain,
    Ended,
    Hello,
    Instruct,
    Join,
    Lines,
    Message,
    Ready,
    Refused,
    Seated,
    Stop,
    decode,
    encode,
    read_contact,
)

LIMIT_S = 30.0
BEAT_S = 0.2


def settings(**changes: object) -> CoordinatorSettings:
    values = {"run": "run", "job": "job", "members": MemberLimits(2, 2, 2, last_call_s=0.1), "generation": 3}
    values["leases"] = SilenceLimits(suspect_s=0.8, dead_s=2.0, look_s=0.05)
    return CoordinatorSettings(**{**values, **changes})  # type: ignore[arg-type]


class Rig:
    """A run folder and the coordinators that were started for it; each is ended by its own id."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[socket.socket] = []

    def start(self, given: CoordinatorSettings | None = None) -> Contact:
        process = start_coordinator(self.run_dir, given or settings())
        self.processes.append(process)
        until_s = time.monotonic() + LIMIT_S
        while (contact := read_contact(self.run_dir)) is None or contact.pid != process.pid:
            assert process.poll() is None, self.log()
            assert time.monotonic() < until_s, self.log()
            time.sleep(0.01)
        return contact

    def nodes(self, contact: Contact, *names: str, token: str | None = None) -> Nodes:
        nodes = Nodes(contact, *names, token=token)
        self.channels.append(nodes.channel)
        return nodes

    def log(self) -> str:
        return (self.run_dir / "logs" / "coordinator.log").read_text()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for channel in rig.channels:
        channel.close()
    for process in rig.processes:
        process.kill()
        process.wait()


class Nodes:
    """A connection that speaks for some nodes, and beats for those that live while it waits for a word."""

    def __init__(self, contact: Contact, *names: str, token: str | None = None) -> None:
        self.names = list(names)
        self.generation = 0
        self.got: list[Message] = []
        self._lines = Lines()
        self.channel = socket.create_connection((contact.host, contact.port))
        self.channel.settimeout(BEAT_S)
        self.say(Hello(contact.run, token or contact.token))

    def say(self, *messages: Message) -> None:
        self.channel.sendall(b"".join(encode(message) for message in messages))

    def join(self, *, is_ready: bool = True) -> None:
        for name in self.names:
            self.say(Join(name, name, "127.0.0.1", 2, generation=self.generation), *([Ready(name, 1000)] if is_ready else []))

    def hear(self, wanted: Callable[[Message], bool]) -> Message:
        """The first message from now on that is wanted; beats meanwhile."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            for message in self.got:
                if wanted(message):
                    self.got.remove(message)
                    return message
            self.say(*(Beat(name, time.monotonic(), self.generation) for name in self.names))
            self._receive()
        raise AssertionError(f"not told in {LIMIT_S} s; {self.got}")

    def _receive(self) -> None:
        try:
            data = self.channel.recv(1 << 16)
        except TimeoutError:
            return
        assert data, "the coordinator hung up"
        self.got += [decode(line) for line in self._lines.feed(data)]

    def begun(self) -> list[BerthGiven]:
        berths = [self.hear(lambda item, name=name: isinstance(item, BerthGiven) and item.node == name) for name in self.names]  # type: ignore[misc]
        found = [berth for berth in berths if isinstance(berth, BerthGiven)]
        self.generation = found[0].generation
        return found

    def is_dropped(self) -> bool:
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            try:
                if not self.channel.recv(1 << 16):
                    return True
            except TimeoutError:
                continue
            except ConnectionError:
                return True
        return False


def test_places_of_a_generation_and_what_survivors_hear_of_a_death(rig: Rig) -> None:
    nodes = rig.nodes(rig.start(), "a", "b")
    nodes.join()
    first, second = nodes.begun()
    assert (first.generation, first.first_rank, first.node_rank, first.world_size) == (4, 0, 0, 4)
    assert (second.generation, second.first_rank, second.node_rank, second.master_port) == (4, 2, 1, 1000)
    nodes.names = ["a"]
    stop = nodes.hear(lambda item: isinstance(item, Stop))
    assert isinstance(stop, Stop)
    assert (stop.node, stop.generation, stop.in_order) == ("a", 4, False)
    assert "node b is gone" in stop.reason
    nodes.say(Ended("a", 4, "stopped", step=7))
    told = nodes.hear(lambda item: isinstance(item, Instruct))
    assert isinstance(told, Instruct)
    assert told.action == "restart"
    refused = nodes.hear(lambda item: isinstance(item, Refused))  # the beats go on to name the generation that is over
    assert isinstance(refused, Refused)
    assert refused.node == "a"


def test_a_killed_coordinator_goes_on_from_its_journal_while_the_ranks_run(rig: Rig) -> None:
    contact = rig.start()
    nodes = rig.nodes(contact, "a", "b")
    nodes.join()
    nodes.begun()
    rig.processes[0].send_signal(signal.SIGKILL)
    rig.processes[0].wait()
    with journal_path(rig.run_dir).open("ab") as journal:
        journal.write(b'{"at_s": 1.0, "happe')  # killed in the middle of a line
    again = rig.start()
    assert (again.epoch, again.token != contact.token) == (contact.epoch + 1, True)
    back = rig.nodes(again, "a", "b")
    back.generation = nodes.generation
    back.join(is_ready=False)
    back.say(Drain("c", "not there", "ops"))  # by its answer the joins have been worked in
    back.hear(lambda item: isinstance(item, Seated) and item.state == "running")
    assert not [item for item in back.got if isinstance(item, Stop | Refused | BerthGiven)]


def test_the_newest_coordinator_is_the_one(rig: Rig) -> None:
    rig.start()
    second = rig.start()
    assert rig.processes[0].wait(timeout=LIMIT_S) == 75
    assert read_contact(rig.run_dir) == second
    assert os.stat(rig.run_dir / "coordinator.json").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b'{"message": "beat", "node": 1}\n', b"x" * (MAX_LINE_BYTES + 2)])
def test_garbage_ends_its_connection_and_nothing_else(rig: Rig, garbage: bytes) -> None:
    contact = rig.start()
    bad = rig.nodes(contact)
    bad.channel.sendall(garbage)
    assert bad.is_dropped()
    stranger = rig.nodes(contact, token="0" * 64)
    assert stranger.is_dropped()
    nodes = rig.nodes(contact, "a", "b")
    nodes.join()
    assert nodes.begun()


def test_a_drain_that_leaves_too_few_is_refused_to_the_one_who_asked(rig: Rig) -> None:
    contact = rig.start()
    nodes = rig.nodes(contact, "a", "b")
    nodes.join()
    nodes.begun()
    person = rig.nodes(contact)
    person.say(Drain("a", "fan", "ops"))
    answer = person.hear(lambda item: isinstance(item, Refused))
    assert isinstance(answer, Refused)
    assert "at least 2 are needed" in answer.reason
