"""The words of membership: nodes and their seats, what happens to them, and what is decided. Records only; `membership` is the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from surefoot.coordinate.restart import RestartHistory
from surefoot.core.records import Fault, Instruction


class Seat(StrEnum):
    """joining: here, no place yet. active: has ranks in the newest generation. spare: would do, but is not needed. parked: may not serve.
    suspect: silent for `suspect_s`. draining: goes at a step boundary. fenced: told to kill its ranks, and not trusted before it says so.
    dead: silent for `dead_s`, so it has killed its ranks itself."""

    JOINING = "joining"
    ACTIVE = "active"
    SPARE = "spare"
    PARKED = "parked"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class MemberLimits:
    """`legal_nodes` are the node counts that have a layout; empty: every count from min to max. The rest is of [launch]."""

    min_nodes: int
    max_nodes: int
    ranks_per_node: int
    legal_nodes: tuple[int, ...] = ()
    last_call_s: float = 1.0
    """Once enough nodes are ready: how long more may come, and how long a former member that just went may come back."""
    gather_s: float = 30.0
    """How long a former member that lives but is not ready (it drains its saves, it warms up) is waited for."""
    leave_s: float = 60.0
    """From a call to leave at a step boundary until the ranks are stopped at once."""
    stop_s: float = 90.0
    """From a call to stop at once until whoever has not said that it did is fenced."""


@dataclass(frozen=True, slots=True)
class Node:
    """`seat` apart from silence, which passes: see `state`. `port` is bound for rank 0 while no rank runs here; 0: it is not ready."""

    node: str
    name: str
    address: str
    capacity: int
    machine: str
    order: int
    seat: Seat = Seat.JOINING
    silent: bool = False
    port: int = 0
    reason: str = ""
    gone_at_s: float | None = None

    @property
    def state(self) -> Seat:
        return Seat.SUSPECT if self.silent and self.seat in (Seat.JOINING, Seat.ACTIVE, Seat.SPARE, Seat.DRAINING) else self.seat


Phase = Literal["forming", "running", "stopping", "held", "over"]
Cause = Literal["", "fault", "grow", "drain", "leave"]


@dataclass(frozen=True, slots=True)
class Membership:
    """Everything that the coordinator remembers. `members` are those of the newest generation, in the order of their ranks.

    `outstanding`: members whose ranks may still run. `faults`, `cause`, `why` are of the generation that stops, or stopped last. `call_s`
    is when the last call began, `since_s` when the phase did, `at_s` the time of the last happening. `instruction` is what was last said to
    those whose generation ended; `has_begun`: this job had a generation. `lost` are nodes that
    this generation lost, `step` the newest step that anybody told; `utc_offset_s` makes a time of windows of the job's clock.
    """

    limits: MemberLimits
    job: str = ""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    phase: Phase = "forming"
    since_s: float = 0.0
    generation: int = 0
    members: tuple[str, ...] = ()
    outstanding: Set[str] = frozenset()
    finished: frozenset[str] = frozenset()
    asked_to_leave: frozenset[str] = frozenset()
    faults: tuple[Fault, ...] = ()
    cause: Cause = ""
    in_order: bool = False
    why: str = ""
    call_s: float | None = None
    wait_until_s: float = 0.0
    num_restarts: int = 0
    history: RestartHistory = field(default_factory=RestartHistory)
    excluded: Mapping[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    step: int = 0
    utc_offset_s: float = 0.0
    instruction: Instruction | None = None
    has_begun: bool = False
    num_joined: int = 0
    at_s: float = 0.0


# --- What happens ---


@dataclass(frozen=True, slots=True)
class Joined:
    node: str
    name: str
    address: str
    capacity: int
    machine: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class BecameReady:
    """No rank is left on the node."""

    node: str
    port: int


@dataclass(frozen=True, slots=True)
class WentSilent:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class CameBack:
    node: str


@dataclass(frozen=True, slots=True)
class Lapsed:
    """Silent for so long that it has fenced itself. `mono_s` is when, on the clock of faults; `step` as in `EndedHere`."""

    node: str
    reason: str
    mono_s: float = 0.0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Faulted:
    node: str
    generation: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class EndedHere:
    """No rank of `generation` is left on the node. `step` is the newest that was finished, as far as the node knows."""

    node: str
    generation: int
    outcome: Literal["finished", "left", "failed", "stopped"]
    fault: Fault | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class WantsToLeave:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """`target` is a node's id, its name, or its machine."""

    target: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class ReadmitAsked:
    target: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    limits: MemberLimits


@dataclass(frozen=True, slots=True)
class JobOpened:
    """Another job goes on with the run. `generation` is the newest that its ledger knows, `history` the budget as the ledger has it.

    `utc_s` is the only wall clock that comes in: windows of the budget reach over jobs.
    """

    job: str
    generation: int
    history: RestartHistory
    utc_s: float = 0.0


Happening = (
    Joined
    | BecameReady
    | WentSilent
    | CameBack
    | Lapsed
    | Faulted
    | EndedHere
    | WantsToLeave
    | DrainAsked
    | ReadmitAsked
    | ReleaseAsked
    | LimitsChanged
    | JobOpened
)


# --- What is decided. `generation` fences: whoever is in another one is not meant. ---


@dataclass(frozen=True, slots=True)
class Place:
    node: str
    node_rank: int
    first_rank: int


@dataclass(frozen=True, slots=True)
class Begin:
    """A generation: its places in order, and where its ranks meet."""

    generation: int
    reason: str
    places: tuple[Place, ...]
    world_size: int
    ranks_per_node: int
    num_restarts: int
    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class CallOff:
    generation: int
    reason: str
    nodes: tuple[str, ...]
    in_order: bool


@dataclass(frozen=True, slots=True)
class Instructed:
    generation: int
    reason: str
    nodes: tuple[str, ...]
    instruction: Instruction


@dataclass(frozen=True, slots=True)
class SeatGiven:
    generation: int
    reason: str
    node: str
    seat: Seat


@dataclass(frozen=True, slots=True)
class Refusal:
    generation: int
    reason: str
    node: str


@dataclass(frozen=True, slots=True)
class HoldBegun:
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobOver:
    generation: int
    reason: str
    exit_code: int


Decision = Begin | CallOff | Instructed | SeatGiven | Refusal | HoldBegun | JobOver


@dataclass(frozen=True, slots=True)
class Incident:
    """What ended a generation: its faults in the order that they were told, the nodes that it lost, of how many, and how far it was."""

    faults: tuple[Fault, ...]
    lost: tuple[str, ...]
    num_nodes: int
    step: int
    utc_s: float


Judge = Callable[[RestartHistory, Incident], tuple[Instruction, RestartHistory]]
"""Pure: whether to go on after an incident, by its grade and the budget of the whole job."""
