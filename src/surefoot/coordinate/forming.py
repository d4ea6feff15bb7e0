"""Which nodes make up the next generation, in which order, and how long it waits for more of them."""

from __future__ import annotations

from dataclasses import replace

from surefoot.coordinate.members import Begin, MemberLimits, Node, Place, Seat
from surefoot.coordinate.membership_draft import Draft

_SERVING = (Seat.JOINING, Seat.ACTIVE, Seat.SPARE)


def largest_legal(limits: MemberLimits, num_nodes: int) -> int:
    """The largest count of nodes with a layout that `num_nodes` can fill; 0 when there is none."""
    counts = limits.legal_nodes or range(limits.min_nodes, limits.max_nodes + 1)
    return max((count for count in counts if limits.min_nodes <= count <= min(num_nodes, limits.max_nodes)), default=0)


def form(draft: Draft) -> None:
    """Begin a generation if enough nodes are ready and nobody is worth waiting for."""
    state = draft.state
    if draft.at_s < state.wait_until_s:
        return
    ready = ready_nodes(draft)
    count = largest_legal(state.limits, len(ready))
    if count == 0:
        draft.set(call_s=None)
        return
    if state.call_s is None:
        draft.set(call_s=draft.at_s)
    if not _worth_waiting(draft, count):
        _begin(draft, ready, count)


def grow(draft: Draft) -> bool:
    """Whether the generation that runs is to end in good order because more nodes can be used. Others that are ready become spares."""
    state = draft.state
    ready = [node for node in ready_nodes(draft) if node.node not in state.members]
    more = largest_legal(state.limits, len(state.members) + len(ready)) > len(state.members)
    if not more or state.finished:
        draft.set(call_s=None)
        for node in ready:
            _spare(draft, node, num_members=len(state.members))
        return False
    if state.call_s is None:
        draft.set(call_s=draft.at_s)
        return state.limits.last_call_s <= 0
    return draft.at_s - state.call_s >= state.limits.last_call_s


def ready_nodes(draft: Draft) -> list[Node]:
    """Those that could have ranks at once: former members in the order that they had, so that node 0 keeps its place, then by arrival."""
    places = {name: index for index, name in enumerate(draft.state.members)}
    ready = [node for node in draft.nodes.values() if node.port and node.seat in _SERVING and not node.silent]
    return sorted(ready, key=lambda node: (places.get(node.node, len(places)), node.order))


def _worth_waiting(draft: Draft, count: int) -> bool:
    """`count` nodes could begin. A former member that lives is waited for longest: without it the job shrinks, only to grow again."""
    state, limits = draft.state, draft.state.limits
    called_s = draft.at_s - (draft.at_s if state.call_s is None else state.call_s)
    former = [draft.nodes[name] for name in state.members if name in draft.nodes]
    if any(node.seat in _SERVING and (not node.port or node.silent) for node in former) and called_s < limits.gather_s:
        return True
    if called_s >= limits.last_call_s:
        return False
    if any(node.seat is Seat.DEAD and draft.at_s - (node.gone_at_s or 0.0) < limits.last_call_s for node in former):
        return True
    if count == largest_legal(limits, limits.max_nodes):
        return False
    coming = any(node.seat is Seat.JOINING and not node.port for node in draft.nodes.values())
    return coming or not state.has_begun


def _begin(draft: Draft, ready: list[Node], count: int) -> None:
    state, per_node = draft.state, draft.state.limits.ranks_per_node
    chosen, surplus = ready[:count], ready[count:]
    generation = state.generation + 1
    reason = f"{count} of {len(ready)} ready nodes" + (f", after: {state.why}" if state.why else "")
    leader = chosen[0]
    places = tuple(Place(node.node, index, index * per_node) for index, node in enumerate(chosen))
    draft.decisions.append(Begin(generation, reason, places, count * per_node, per_node, state.num_restarts, leader.address, leader.port))
    names = tuple(node.node for node in chosen)
    for node in chosen:
        draft.nodes[node.node] = replace(node, seat=Seat.ACTIVE, port=0, reason=f"in generation {generation}")
    draft.outstanding.update(names)  # nobody was left in it
    draft.set(
        phase="running", since_s=draft.at_s, generation=generation, members=names, finished=frozenset(),
        asked_to_leave=frozenset(), has_begun=True, lost=(), faults=(), cause="", in_order=False, why="", call_s=None,
    )  # fmt: skip
    for node in surplus:
        _spare(draft, node, num_members=count)


def _spare(draft: Draft, node: Node, *, num_members: int) -> None:
    if node.seat is not Seat.SPARE:
        draft.seat(node.node, Seat.SPARE, f"{num_members} nodes run, no larger number with it is legal; it can replace a lost one")
