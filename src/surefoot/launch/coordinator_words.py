"""Between the wire and the machine: what a message means as something that happened, and who is told what about a decision."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.coordinate.members import (
    BecameReady,
    Begin,
    CallOff,
    CameBack,
    Decision,
    DrainAsked,
    EndedHere,
    Faulted,
    Happening,
    Instructed,
    Joined,
    Lapsed,
    ReadmitAsked,
    Refusal,
    ReleaseAsked,
    SeatGiven,
    WantsToLeave,
    WentSilent,
)
from surefoot.coordinate.silence import SilenceChange
from surefoot.core.records import Fault
from surefoot.core.typed_json import record_from_json
from surefoot.launch.coordinator_wire import (
    BerthGiven,
    Drain,
    Ended,
    FaultSeen,
    Instruct,
    Join,
    Leave,
    Message,
    Readmit,
    Ready,
    Refused,
    Release,
    Seated,
    Stop,
)


def happening_of(message: Message) -> Happening | None:
    """What a message means to the machine; None when that is nothing. Raises ValueError when a fault in it is none."""
    match message:
        case Join(node=node, name=name, address=address, capacity=capacity, machine=machine, generation=generation):
            return Joined(node, name, address, capacity, machine, generation)
        case Ready(node=node, port=port):
            return BecameReady(node, port)
        case FaultSeen(node=node, generation=generation, fault=fault):
            return Faulted(node, generation, record_from_json(Fault, fault))
        case Ended(node=node, generation=generation, outcome=outcome, fault=fault, step=step):
            return EndedHere(node, generation, outcome, record_from_json(Fault, fault) if fault else None, step)
        case Leave(node=node, reason=reason):
            return WantsToLeave(node, reason)
        case Drain(node=node, reason=reason, by=by):
            return DrainAsked(node, reason, by)
        case Readmit(node=node, reason=reason, by=by):
            return ReadmitAsked(node, reason, by)
        case Release(reason=reason, by=by):
            return ReleaseAsked(reason, by)
    return None


def happening_of_silence(change: SilenceChange, *, mono_s: float, step: int) -> Happening:
    if change.kind == "suspect":
        return WentSilent(change.node, change.reason)
    return CameBack(change.node) if change.kind == "back" else Lapsed(change.node, change.reason, mono_s, step)


def messages_of(decision: Decision) -> Iterable[tuple[str, BerthGiven | Stop | Instruct | Seated | Refused]]:
    """Who is told what about a decision."""
    generation, reason = decision.generation, decision.reason
    match decision:
        case Begin(places=places):
            for place in places:
                yield place.node, BerthGiven(
                    place.node, generation, decision.num_restarts, decision.world_size, place.first_rank, decision.ranks_per_node,
                    decision.master_addr, decision.master_port, place.node_rank, len(places), reason,
                )  # fmt: skip
        case CallOff(nodes=nodes, in_order=in_order):
            for node in nodes:
                yield node, Stop(node, generation, reason, in_order)
        case Instructed(nodes=nodes, instruction=one):
            for node in nodes:
                yield node, Instruct(node, generation, one.kind, reason, one.grade.value, one.exit_code, one.wait_s)
        case SeatGiven(node=node, seat=seat):
            yield node, Seated(node, seat.value, reason)
        case Refusal(node=node):
            yield node, Refused(node, generation, reason)
