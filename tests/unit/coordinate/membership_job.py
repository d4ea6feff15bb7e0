"""A job of simulated nodes for tests of membership: real machine, real leases, nodes that fence themselves by their own rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from surefoot.coordinate.members import (
    BecameReady,
    Begin,
    CallOff,
    CameBack,
    Decision,
    EndedHere,
    Happening,
    Instructed,
    Joined,
    Judge,
    Lapsed,
    MemberLimits,
    Membership,
    Refusal,
    WentSilent,
)
from surefoot.coordinate.membership import advance, due_s, is_acknowledged
from surefoot.coordinate.membership_judge import judge_by
from surefoot.coordinate.silence import Silence, SilenceChange, SilenceLimits, look
from surefoot.core.records import Fault
from surefoot.core.sections import LaunchSection

TICK_S = 0.25
LEASES = SilenceLimits(look_s=TICK_S)
LIMITS = MemberLimits(min_nodes=2, max_nodes=3, ranks_per_node=2)
JUDGE = judge_by(LaunchSection(max_restarts=1000, no_progress_limit=1000, restart_wait_s=0.0, window_restarts=1000))


def fault(reason: str = "rank 1 was killed by SIGKILL", *, step: int = 1) -> Fault:
    return Fault("rank", reason, 1, None, 9, step, 0.0)


@dataclass
class Steps:
    """A state and the calls that led to it."""

    state: Membership
    judge: Judge = JUDGE
    at_s: float = 0.0
    log: list[tuple[float, tuple[Happening, ...]]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def tell(self, *happenings: Happening, wait_s: float = 0.0) -> tuple[Decision, ...]:
        self.at_s += wait_s
        self.log.append((self.at_s, happenings))
        self.state, made = advance(self.state, happenings, at_s=self.at_s, judge=self.judge)
        self.decisions += made
        return made

    def arrive(self, *names: str, capacity: int = 2) -> tuple[Decision, ...]:
        return self.tell(*(happening for name in names for happening in (joined(name, capacity=capacity), BecameReady(name, 1000))))


def joined(name: str, *, capacity: int = 2, generation: int = 0) -> Joined:
    return Joined(name, name, f"10.0.0.{name[-1]}", capacity, f"machine-{name}", generation)


def running(*names: str, limits: MemberLimits = LIMITS) -> Steps:
    steps = Steps(Membership(limits))
    steps.arrive(*names)
    steps.tell(wait_s=limits.last_call_s)
    assert steps.state.phase == "running"
    return steps


@dataclass
class SimulatedNode:
    """What a real node does, by its own clock: beats, acknowledgements, the rule of self-fencing, a berth, a stop.

    `writes` holds while a rank of `generation` runs here. `cut`: no packet passes in either direction.
    """

    name: str
    alive: bool = True
    cut: bool = False
    generation: int = 0
    acked_s: float = 0.0
    joined: bool = False
    ready_at_s: float | None = 0.0
    stops_at_s: float | None = None
    outbox: list[Happening] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        return self.alive and self.generation > 0


class SimulatedJob:
    """Coordinator, leases and nodes in one loop of ticks. `node_fence_s`, `tamper` and `impatient` are how tests seed a bug."""

    def __init__(self, names: Iterable[str], *, limits: MemberLimits = LIMITS, node_fence_s: float = LEASES.fence_s) -> None:
        self.nodes = {name: SimulatedNode(name) for name in names}
        self.steps = Steps(Membership(limits))
        self.silence = Silence()
        self.now_s = 0.0
        self.coordinator_pause_s = 0.0
        self.node_fence_s = node_fence_s
        self.impatient = False
        self.tamper: Callable[[tuple[Decision, ...]], tuple[Decision, ...]] = lambda decisions: decisions
        self.grants: dict[tuple[int, int], str] = {}
        self.violations: list[str] = []
        self.served_s = 0.0

    def tick(self) -> None:
        self.now_s += TICK_S
        happenings = [happening for node in self.nodes.values() for happening in self._live(node)]
        if self.now_s >= self.coordinator_pause_s:
            self._coordinate(happenings)
        self._check()

    def _live(self, node: SimulatedNode) -> list[Happening]:
        if not node.alive:
            node.generation = 0
            return []
        if node.generation and self.now_s - node.acked_s >= self.node_fence_s:
            node.generation, node.joined, node.ready_at_s, node.stops_at_s = 0, False, self.now_s + 0.5, None
        if node.cut or self.now_s < self.coordinator_pause_s:
            return []
        said: list[Happening] = []
        if not node.joined:
            said.append(joined(node.name, generation=node.generation))
            node.joined = True
        said += node.outbox
        node.outbox = []
        if node.stops_at_s is not None and self.now_s >= node.stops_at_s and node.generation:
            said.append(EndedHere(node.name, node.generation, "stopped"))
            node.generation, node.stops_at_s, node.ready_at_s = 0, None, None
        if node.ready_at_s is not None and self.now_s >= node.ready_at_s and not node.generation:
            said.append(BecameReady(node.name, 1000))
            node.ready_at_s = None
        return said

    def _coordinate(self, happenings: list[Happening]) -> None:
        heard = [node for node in self.nodes.values() if node.alive and not node.cut]
        state = self.steps.state
        acked = [node for node in heard if is_acknowledged(state, node.name) or any(joins(item, node.name) for item in happenings)]
        for node in acked:
            node.acked_s = self.now_s
        self.silence, changes = look(self.silence, heard=[node.name for node in acked], now_s=self.now_s, limits=LEASES)
        happenings += [happening_of(change) for change in changes]
        due = due_s(state)
        if happenings or (due is not None and self.now_s >= due):
            self.steps.at_s = self.now_s
            for decision in self.tamper(self.steps.tell(*happenings)):
                self._carry_out(decision)
        for node in heard:  # what a real coordinator answers to the beat of a node that it does not count any more
            known = self.steps.state.nodes.get(node.name)
            if known is not None and not is_acknowledged(self.steps.state, node.name) and node.joined:
                node.generation, node.joined, node.ready_at_s = 0, False, self.now_s + 0.2

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Begin):
            for place in decision.places:
                before = self.grants.setdefault((decision.generation, place.first_rank), place.node)
                if before != place.node:
                    self.violations.append(f"rank {place.first_rank} of generation {decision.generation} is {before}'s and {place.node}'s")
                node = self.nodes[place.node]
                if node.alive and not node.cut:
                    node.generation, node.stops_at_s = decision.generation, None
        elif isinstance(decision, CallOff):
            for name in decision.nodes:
                node = self.nodes[name]
                if self.impatient:
                    self.steps.tell(EndedHere(name, decision.generation, "stopped"), BecameReady(name, 1000))
                if node.alive and not node.cut and node.generation == decision.generation:
                    node.stops_at_s = self.now_s + 0.3
        elif isinstance(decision, Instructed):
            for name in decision.nodes:
                if self.nodes[name].alive and not self.nodes[name].cut and decision.instruction.kind == "restart":
                    self.nodes[name].ready_at_s = self.now_s + decision.instruction.wait_s + 0.2
        elif isinstance(decision, Refusal) and decision.node in self.nodes:
            node = self.nodes[decision.node]
            if node.alive and not node.cut:
                node.generation, node.joined, node.ready_at_s = 0, False, self.now_s + 0.2

    def _check(self) -> None:
        writing = {node.generation for node in self.nodes.values() if node.writes}
        if len(writing) > 1:
            self.violations.append(f"at {self.now_s:.1f} s ranks of generations {sorted(writing)} write")
        state = self.steps.state
        able = [node for node in self.nodes.values() if node.alive and not node.cut]
        if state.phase in ("running", "held", "over") or len(able) < state.limits.min_nodes:
            self.served_s = self.now_s


def joins(happening: Happening, name: str) -> bool:
    return isinstance(happening, Joined) and happening.node == name


def happening_of(change: SilenceChange) -> Happening:
    if change.kind == "suspect":
        return WentSilent(change.node, change.reason)
    return CameBack(change.node) if change.kind == "back" else Lapsed(change.node, change.reason)


def start_again(node: SimulatedNode, *, now_s: float) -> None:
    """A new agent on the same machine: nothing of the old one is left."""
    node.alive, node.generation, node.joined, node.ready_at_s, node.stops_at_s, node.outbox = True, 0, False, now_s + 0.5, None, []


def reconnect(node: SimulatedNode, *, now_s: float) -> None:
    """The network is back: the node joins again, with the ranks that it has."""
    node.cut, node.joined = False, False
    if not node.generation:
        node.ready_at_s = now_s + 0.2


def lose_rank(node: SimulatedNode) -> None:
    """A rank dies; its node kills the others and says so."""
    if node.writes:
        node.outbox.append(EndedHere(node.name, node.generation, "failed", fault()))
        node.generation, node.stops_at_s = 0, None
