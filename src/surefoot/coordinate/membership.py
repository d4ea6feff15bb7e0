"""Who is in the job, which generation of ranks runs, when another begins: a pure machine, (state, happenings) -> (state, decisions).

forming -> running -> stopping -> forming, or held (a person or a passed check releases it), or over. A generation begins only when no rank
of the one before can be left: every member has said so, or has been silent for so long that it has fenced itself. What one node does wrong
never closes the job: it is refused, parked, fenced or counted dead, each with its reason. A member that leaves, is drained, or is joined by
others ends its generation in good order at a step boundary, and costs none of the budget; a lost one ends it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from surefoot.coordinate.forming import form, grow
from surefoot.coordinate.members import (
    BecameReady,
    CallOff,
    CameBack,
    Decision,
    DrainAsked,
    EndedHere,
    Faulted,
    Happening,
    HoldBegun,
    Incident,
    JobOpened,
    JobOver,
    Joined,
    Judge,
    Lapsed,
    LimitsChanged,
    Membership,
    Node,
    ReadmitAsked,
    ReleaseAsked,
    Seat,
    WantsToLeave,
    WentSilent,
)
from surefoot.coordinate.membership_draft import Draft
from surefoot.coordinate.restart import RestartHistory
from surefoot.core.errors import EXIT_DONE, EXIT_RETRY, Held
from surefoot.core.records import Fault, Grade, Instruction


def advance(state: Membership, happenings: Iterable[Happening], *, at_s: float, judge: Judge) -> tuple[Membership, tuple[Decision, ...]]:
    """What happened, or nothing but time, up to `at_s` of the job's clock. The same calls in the same order give the same state."""
    draft = Draft(state, at_s=at_s)
    for happening in happenings:
        _HEAR[type(happening)](draft, happening)
    _settle(draft, judge)
    return draft.frozen(), tuple(draft.decisions)


def due_s(state: Membership) -> float | None:
    """When `advance` is to be called even if nothing happens; None when only a happening can change anything."""
    limits = state.limits
    times_s = [state.wait_until_s] if state.phase == "forming" else []
    if state.call_s is not None and state.phase in ("forming", "running"):
        times_s += [state.call_s + limits.last_call_s, state.call_s + limits.gather_s]
    if state.phase == "stopping":
        times_s.append(state.since_s + (limits.leave_s if state.in_order else limits.stop_s))
    return min((time_s for time_s in times_s if time_s > state.at_s), default=None)


def is_acknowledged(state: Membership, node: str) -> bool:
    """Whether this node's beats are answered. One that is not ends its own ranks within `dead_s`: to stay silent is a fence, too."""
    known = state.nodes.get(node)
    return known is not None and known.seat not in (Seat.FENCED, Seat.DEAD)


def why_stale(state: Membership, node: str, *, generation: int) -> str | None:
    """Why what this node says of the ranks of `generation` does not count any more; None when it does."""
    if generation != state.generation:
        return f"generation {generation} is over, the newest one is {state.generation}"
    if node in state.outstanding:  # asked at every beat, so before the walk through all members
        return None
    return f"its ranks of generation {generation} are counted as gone" if node in state.members else f"it is not in generation {generation}"


def _joined(draft: Draft, event: Joined) -> None:
    known = draft.nodes.get(event.node)
    if event.node in draft.state.outstanding and known is not None:
        if event.generation == draft.state.generation and known.seat is not Seat.FENCED:
            draft.nodes[event.node] = replace(known, name=event.name, address=event.address, silent=False)
            return
        if event.generation == 0:
            _gone(draft, event.node, _node_fault(draft, f"node {known.name} was started anew: its ranks are gone"))
    order = known.order if known else draft.state.num_joined
    draft.set(num_joined=max(draft.state.num_joined, order + 1))
    node = Node(event.node, event.name, event.address, event.capacity, event.machine or event.node, order)
    draft.nodes[event.node] = node
    if event.generation:
        _fence(draft, node, f"its ranks of generation {event.generation} may still run, and are not of this job any more")
    else:
        seat, reason = _entry(draft, node)
        draft.seat(node.node, seat, reason)


def _entry(draft: Draft, node: Node) -> tuple[Seat, str]:
    if node.machine in draft.state.excluded:
        return Seat.PARKED, draft.state.excluded[node.machine]
    needed = draft.state.limits.ranks_per_node
    if node.capacity < needed:
        return Seat.PARKED, f"it has room for {node.capacity} ranks, {needed} are needed"
    return Seat.JOINING, "joined"


def _ready(draft: Draft, event: BecameReady) -> None:
    node = draft.nodes.get(event.node)
    if node is None:
        draft.refuse(event.node, "it has not joined")
        return
    if event.node in draft.state.outstanding:
        failed = draft.state.phase == "running"
        _gone(draft, event.node, _node_fault(draft, f"the ranks of node {node.name} are gone, it did not say how") if failed else None)
    draft.nodes[event.node] = node = replace(draft.nodes[event.node], port=event.port, silent=False)
    if node.seat in (Seat.DEAD, Seat.FENCED):
        seat, reason = _entry(draft, node)
        draft.seat(event.node, seat, f"no rank is left on it: {reason}")
    if draft.state.phase in ("held", "over") and draft.state.instruction is not None:
        draft.instruct((event.node,), draft.state.instruction)


def _silent(draft: Draft, event: WentSilent) -> None:
    if event.node in draft.nodes:
        draft.nodes[event.node] = replace(draft.nodes[event.node], silent=True)
        draft.tell(event.node, event.reason)


def _back(draft: Draft, event: CameBack) -> None:
    if event.node in draft.nodes:
        draft.nodes[event.node] = replace(draft.nodes[event.node], silent=False)


def _lapsed(draft: Draft, event: Lapsed) -> None:
    node = draft.nodes.get(event.node)
    if node is None:
        return
    if event.node in draft.state.members and node.seat is not Seat.DEAD and event.node not in draft.state.asked_to_leave:
        draft.set(lost=(*draft.state.lost, node.name))
    draft.nodes[event.node] = replace(node, port=0, silent=False, gone_at_s=draft.at_s)
    draft.set(step=max(draft.state.step, event.step))
    draft.seat(event.node, Seat.DEAD, event.reason)
    if event.node in draft.state.outstanding:
        fault = _node_fault(draft, f"node {node.name} is gone: {event.reason}", mono_s=event.mono_s)
        asked = node.seat is Seat.FENCED or event.node in draft.state.asked_to_leave
        _gone(draft, event.node, None if asked and draft.state.phase == "stopping" else fault)


def _faulted(draft: Draft, event: Faulted) -> None:
    if (stale := why_stale(draft.frozen(), event.node, generation=event.generation)) is not None:
        draft.refuse(event.node, stale)
        return
    draft.set(faults=(*draft.state.faults, event.fault))
    _stop(draft, "fault", event.fault.reason)


def _ended(draft: Draft, event: EndedHere) -> None:
    state = draft.state
    if (stale := why_stale(state, event.node, generation=event.generation)) is not None:
        known = event.generation == state.generation and event.node in state.members and state.phase in ("forming", "held", "over")
        if known and state.instruction is not None:
            draft.instruct((event.node,), state.instruction)  # the answer was lost on its way
        else:
            draft.refuse(event.node, stale)
        return
    draft.set(step=max(state.step, event.step))
    if event.outcome == "finished":
        draft.set(finished=state.finished | {event.node})
    fault = event.fault if event.outcome == "failed" else None
    if event.outcome == "failed" and fault is None:
        fault = _node_fault(draft, f"the ranks of node {draft.nodes[event.node].name} failed, it did not say how")
    _gone(draft, event.node, fault)


def _leaves(draft: Draft, event: WantsToLeave) -> None:
    node = draft.nodes.get(event.node)
    if node is None:
        return
    if event.node in draft.state.outstanding:
        draft.set(asked_to_leave=draft.state.asked_to_leave | {event.node})
        draft.seat(event.node, Seat.DRAINING, event.reason)
        _stop(draft, "leave", f"node {node.name} leaves: {event.reason}", in_order=True)
    elif node.seat is not Seat.DEAD:
        draft.nodes[event.node] = replace(node, port=0, silent=False, gone_at_s=draft.at_s)
        draft.seat(event.node, Seat.DEAD, f"it left: {event.reason}")


def _drained(draft: Draft, event: DrainAsked) -> None:
    meant = [node for node in draft.nodes.values() if event.target in (node.node, node.name, node.machine)]
    members = [node for node in meant if node.node in draft.state.outstanding]
    others = [node for node in draft.nodes.values() if node not in meant and _serves(draft, node)]
    if members and len(others) < draft.state.limits.min_nodes:
        draft.refuse(
            event.target, f"without it {len(others)} nodes are left, at least {draft.state.limits.min_nodes} are needed: add one first"
        )
        return
    reason = f"drained by {event.by}: {event.reason}"
    machines = {node.machine for node in meant} or {event.target}
    draft.set(excluded={**draft.state.excluded, **dict.fromkeys(sorted(machines), reason)})
    for node in meant:
        if node in members:
            draft.seat(node.node, Seat.DRAINING, reason)
        elif node.seat not in (Seat.DEAD, Seat.FENCED):
            draft.seat(node.node, Seat.PARKED, reason)
    if members:
        _stop(draft, "drain", f"node {members[0].name} is {reason}", in_order=True)


def _serves(draft: Draft, node: Node) -> bool:
    return not node.silent and node.seat in (Seat.JOINING, Seat.ACTIVE, Seat.SPARE) and node.machine not in draft.state.excluded


def _readmitted(draft: Draft, event: ReadmitAsked) -> None:
    meant = [node for node in draft.nodes.values() if event.target in (node.node, node.name, node.machine)]
    machines = {event.target, *(node.machine for node in meant)}
    if not machines & draft.state.excluded.keys():
        draft.refuse(event.target, "it is not excluded")
        return
    draft.set(excluded={machine: why for machine, why in draft.state.excluded.items() if machine not in machines})
    for node in meant:
        if node.seat is Seat.PARKED:
            seat, reason = _entry(draft, node)
            draft.seat(node.node, seat, f"readmitted by {event.by}: {event.reason}" if seat is Seat.JOINING else reason)


def _released(draft: Draft, event: ReleaseAsked) -> None:
    if draft.state.phase != "held":
        draft.refuse("", f"the job is not held, it is {draft.state.phase}")
        return
    history = RestartHistory(newest_step=draft.state.history.newest_step)  # as the ledger folds a release
    draft.set(phase="forming", since_s=draft.at_s, why=f"released by {event.by}: {event.reason}", lost=(), history=history, call_s=None)


def _limits_changed(draft: Draft, event: LimitsChanged) -> None:
    draft.set(limits=event.limits)


def _job_opened(draft: Draft, event: JobOpened) -> None:
    """Nodes of the job before have no coordinator any more, so they fence themselves: they are waited for, and are nobody's fault."""
    state = draft.state
    for node in draft.nodes.values():
        if node.node not in state.outstanding:
            draft.nodes[node.node] = replace(node, seat=Seat.DEAD, port=0, silent=False, reason=f"of job {state.job}")
    draft.set(
        job=event.job, generation=max(state.generation, event.generation), history=event.history, num_restarts=0, lost=(), faults=(),
        utc_offset_s=event.utc_s - draft.at_s,
        asked_to_leave=frozenset(state.outstanding), has_begun=False, wait_until_s=0.0, call_s=None, since_s=draft.at_s,
    )  # fmt: skip
    if state.phase != "held":
        why = f"job {event.job} goes on with the run"
        draft.set(phase="stopping" if state.outstanding else "forming", cause="leave", in_order=False, why=why, finished=frozenset())


_HEAR: Mapping[type[Any], Callable[[Draft, Any], None]] = {
    Joined: _joined,
    BecameReady: _ready,
    WentSilent: _silent,
    CameBack: _back,
    Lapsed: _lapsed,
    Faulted: _faulted,
    EndedHere: _ended,
    WantsToLeave: _leaves,
    DrainAsked: _drained,
    ReadmitAsked: _readmitted,
    ReleaseAsked: _released,
    LimitsChanged: _limits_changed,
    JobOpened: _job_opened,
}


def _node_fault(draft: Draft, reason: str, *, mono_s: float = 0.0) -> Fault:
    return Fault("node", reason, None, None, None, draft.state.step, mono_s, step_known=False)


def _fence(draft: Draft, node: Node, reason: str) -> None:
    draft.seat(node.node, Seat.FENCED, reason)
    draft.refuse(node.node, reason)


def _gone(draft: Draft, node: str, fault: Fault | None) -> None:
    """No rank of `node` is left. With a fault the generation ends, if it does not already."""
    draft.outstanding.discard(node)
    if fault is not None:
        draft.set(faults=(*draft.state.faults, fault))
        _stop(draft, "fault", fault.reason)


def _stop(draft: Draft, cause: Any, why: str, *, in_order: bool = False) -> None:
    """End the generation; an end in good order that is under way becomes one at once when a fault comes on top of it."""
    state = draft.state
    more_urgent = state.phase == "stopping" and state.in_order and not in_order
    if state.phase == "running" or more_urgent:
        draft.set(phase="stopping", since_s=draft.at_s, cause=cause, in_order=in_order, why=why, call_s=None)
        nodes = tuple(node for node in state.members if node in state.outstanding)
        draft.decisions.append(CallOff(state.generation, why, nodes, in_order))


def _settle(draft: Draft, judge: Judge) -> None:
    state = draft.state
    if state.phase == "stopping" and state.outstanding:
        _press(draft)
    if draft.state.phase in ("running", "stopping") and not draft.state.outstanding:
        _conclude(draft, judge)
    if draft.state.phase == "forming":
        form(draft)
    elif draft.state.phase == "running" and grow(draft):
        _stop(draft, "grow", f"{len(draft.state.members)} nodes run, and more are ready", in_order=True)


def _press(draft: Draft) -> None:
    """Whoever does not stop in time is stopped harder: called off at once, then fenced. A fenced node lapses, which ends the wait."""
    state, waited_s = draft.state, draft.at_s - draft.state.since_s
    if state.in_order and waited_s >= state.limits.leave_s:
        why = f"{state.why}; its ranks did not leave within {state.limits.leave_s:g} s"
        _stop(draft, state.cause, why)
    elif not state.in_order and waited_s >= state.limits.stop_s:
        for node in sorted(state.outstanding):
            if draft.nodes[node].seat is not Seat.FENCED:
                _fence(draft, draft.nodes[node], f"its ranks did not stop within {state.limits.stop_s:g} s")


def _conclude(draft: Draft, judge: Judge) -> None:
    """No rank is left. What comes next, for all who were in it."""
    state = draft.state
    if state.faults:
        incident = Incident(state.faults, state.lost, len(state.members), state.step, draft.at_s + state.utc_offset_s)
        instruction, history = judge(state.history, incident)
        draft.set(history=history, num_restarts=state.num_restarts + (instruction.kind == "restart"))
    else:
        instruction = _planned(draft)
    live = tuple(node for node in state.members if draft.nodes[node].seat not in (Seat.DEAD, Seat.FENCED))
    draft.set(instruction=instruction, since_s=draft.at_s, call_s=None, why=instruction.reason)
    for node in live:
        _unseat(draft, node)
    leaving = tuple(node for node in live if node in state.asked_to_leave)
    if instruction.kind == "restart":
        draft.set(phase="forming", wait_until_s=draft.at_s + instruction.wait_s)
        draft.instruct(tuple(node for node in live if node not in leaving), instruction)
        draft.instruct(leaving, Instruction("stop", "it leaves as it asked", Grade.PLANNED, exit_code=EXIT_RETRY))
        return
    draft.instruct(live, instruction)
    if instruction.exit_code == Held.exit_code:
        draft.set(phase="held")
        draft.decisions.append(HoldBegun(state.generation, instruction.reason))
    else:
        draft.set(phase="over")
        draft.decisions.append(JobOver(state.generation, instruction.reason, instruction.exit_code))


def _planned(draft: Draft) -> Instruction:
    """The generation ended without a fault."""
    state = draft.state
    if len(state.finished) == len(state.members):
        return Instruction("stop", "the run is finished", Grade.PLANNED, exit_code=EXIT_DONE)
    if state.cause:
        return Instruction("restart", state.why, Grade.PLANNED)
    return Instruction("stop", "its ranks left as they were asked", Grade.PLANNED, exit_code=EXIT_RETRY)


def _unseat(draft: Draft, name: str) -> None:
    node = draft.nodes[name]
    if node.machine in draft.state.excluded:
        draft.seat(name, Seat.PARKED, draft.state.excluded[node.machine])
    elif name not in draft.state.asked_to_leave:
        draft.nodes[name] = replace(node, seat=Seat.JOINING, reason="its generation ended")
