"""What ranks say about themselves, read together: who waits in which collective, for whom, and the words for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from surefoot.coordinate.causes import is_peer_error
from surefoot.coordinate.witness import GroupState, Witness
from surefoot.core.errors import EXIT_DONE

# Every rank of these passes inputs of one shape; others (gather, scatter, all-to-all) may differ without being wrong.
_SAME_SHAPE = (
    *("all_reduce", "allreduce", "broadcast", "reduce_scatter", "_reduce_scatter_base"),
    *("_allgather_base", "all_gather_into_tensor"),
)
_MAX_EVIDENCE = 16  # lines; a record of ten thousand ranks is read by nobody


def ended_badly(witness: Witness) -> bool:
    return witness.signal is not None or witness.exit_code not in (None, EXIT_DONE)


def have_ended(seen: Mapping[int, Witness], ranks: Iterable[int]) -> bool:
    return any(rank in seen and (seen[rank].signal is not None or seen[rank].exit_code is not None) for rank in ranks)


def state_of(witness: Witness, name: str) -> GroupState | None:
    return next((state for state in witness.groups or () if state.name == name and not state.is_p2p), None)


def waiting_in(witness: Witness) -> list[GroupState]:
    """The collectives that it enqueued and that did not end. Point-to-point has its own numbers, which say nothing about a group."""
    return [state for state in witness.groups or () if not state.is_p2p and state.last_completed < state.last_enqueued]


def missing_for(rank: int, seen: Mapping[int, Witness]) -> frozenset[int]:
    """Whom `rank` waits for: members of its group that have not enqueued what it waits in, or that give no account of themselves.

    Who does not list the group is no member of it, or has not used it yet; that is told by the default group, which all ranks share.
    """
    missing = set()
    for state in waiting_in(seen[rank]):
        for other, witness in seen.items():
            theirs = state_of(witness, state.name)
            if other == rank:
                continue
            silent = witness.groups is None and not is_peer_error(witness) and _is_shared(state.name, seen)
            if silent or (theirs is not None and theirs.last_enqueued < state.last_enqueued):
                missing.add(other)
    return frozenset(missing)


def _is_shared(name: str, seen: Mapping[int, Witness]) -> bool:
    """Whether every rank that answered is a member: only then may one that did not answer be taken for one."""
    return all(state_of(witness, name) is not None for witness in seen.values() if witness.groups is not None)


def signature_of(state: GroupState) -> tuple[object, ...]:
    bare = state.operation.rpartition(":")[2]
    same_shape = any(bare.startswith(prefix) for prefix in _SAME_SHAPE)
    return (state.operation, state.shapes, state.dtypes) if same_shape else (state.operation,)


def members_of(seen: Mapping[int, Witness], name: str) -> dict[int, GroupState]:
    return {rank: state for rank, witness in seen.items() if (state := state_of(witness, name)) is not None}


def group_names(seen: Mapping[int, Witness]) -> list[str]:
    return sorted({state.name for witness in seen.values() for state in witness.groups or () if not state.is_p2p})


def pending_collective(witnesses: Iterable[Witness]) -> GroupState | None:
    """The collective that ranks wait in: of several the one that most wait in."""
    waiting = [state for witness in witnesses for state in waiting_in(witness)]
    if not waiting:
        return None
    counts: dict[tuple[str, int], int] = {}
    for state in waiting:
        counts[state.name, state.last_enqueued] = counts.get((state.name, state.last_enqueued), 0) + 1
    name, number = max(counts, key=lambda key: (counts[key], key))
    return next(state for state in waiting if (state.name, state.last_enqueued) == (name, number))


def in_collective(stack: Sequence[str]) -> bool:
    return any("torch/distributed" in frame or "distributed_c10d" in frame for frame in stack[:12])


def stack_fingerprint(seen: Mapping[int, Witness], ranks: Sequence[int]) -> str:
    """Where one blamed rank stood: hanging twice at one line of one step is the program's doing."""
    if len(ranks) != 1 or ranks[0] not in seen or not seen[ranks[0]].stack:
        return ""
    return f"hangs at {seen[ranks[0]].stack[0]}"


# --- words ---


def nodes_of(seen: Mapping[int, Witness], ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(seen[rank].node for rank in ranks if rank in seen and seen[rank].node))


def named(seen: Mapping[int, Witness], ranks: Sequence[int]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks)
    nodes = nodes_of(seen, ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}" + (f" on {', '.join(nodes)}" if nodes else "")


def operation_text(state: GroupState) -> str:
    shapes = ", ".join(f"{list(shape)}" for shape in state.shapes)
    return f"{state.operation or 'an operation'}" + (f" of {shapes} {'/'.join(state.dtypes)}".rstrip() if shapes else "")


def collective_text(state: GroupState) -> str:
    return f"{state.operation or 'a collective'} (group {state.name}, number {state.last_enqueued})"


def while_waiting(reason: str, seen: Mapping[int, Witness], ranks: Sequence[int]) -> str:
    others = [witness for rank, witness in seen.items() if rank not in ranks and waiting_in(witness)]
    collective = pending_collective(others)
    if collective is None:
        return reason
    waiting = f"{named(seen, [witness.rank for witness in others])} wait{'s' if len(others) == 1 else ''}"
    return f"{reason} while {waiting} in {collective_text(collective)}"


def evidence_lines(witnesses: Iterable[Witness]) -> tuple[str, ...]:
    """A line per rank, of the first ones: what a person would read first."""
    lines = []
    for witness in list(witnesses)[:_MAX_EVIDENCE]:
        if witness.signal is not None:
            what = f"ended by signal {witness.signal}"
        elif witness.exit_code is not None:
            what = f"left with {witness.exit_code}"
        else:
            what = f"state {witness.process_state or '?'}, last beat {witness.age_s:.1f} s ago"
        waiting = waiting_in(witness)
        said = f"waits in {collective_text(waiting[0])}" if waiting else "waits in no collective"
        said = "did not answer" if witness.groups is None else said
        lines.append(f"rank {witness.rank}: {what}; {said}")
    return tuple(lines)
