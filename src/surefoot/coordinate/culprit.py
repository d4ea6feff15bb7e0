"""Who is to blame: from what is known about every rank at an alarm to the rank that the others waited for. Pure.

The ranks that complain are usually not those that failed: a peer that is gone breaks everybody's collective. So the rules ask, in order,
for a whole node that is gone, for a death that is no complaint, for a stopped process, for two operations where there should be one, and
for the rank that somebody waits for while it waits for nobody. Who is left when all ranks wait in the same collective is the network or
the library, and no rank. Where evidence ties nobody is blamed and the candidates are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.coordinate.accounts import (
    collective_text,
    ended_badly,
    evidence_lines,
    group_names,
    have_ended,
    in_collective,
    members_of,
    missing_for,
    named,
    nodes_of,
    operation_text,
    pending_collective,
    signature_of,
    stack_fingerprint,
    state_of,
    waiting_in,
    while_waiting,
)
from surefoot.coordinate.causes import DELIBERATE_CODES, Cause, HostFacts, cause_of, cause_of_alarm, is_peer_error
from surefoot.coordinate.witness import Alarm, GroupState, Witness

Confidence = Literal["certain", "likely", "inconclusive"]

# A rank that is killed closes its sockets before its parent can reap it, so an error exit of a peer may be reported this much earlier.
SAME_MOMENT_S = 0.1


@dataclass(frozen=True, slots=True)
class Culprit:
    """`ranks` is empty when nobody is blamed: then `candidates` are those that it may be. `collective` is the one that was waited in."""

    ranks: tuple[int, ...]
    cause: Cause
    confidence: Confidence
    reason: str
    candidates: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    collective: GroupState | None = None
    evidence: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    fingerprint: str = ""


def find_culprit(alarm: Alarm, witnesses: Sequence[Witness], *, facts: HostFacts | None = None) -> Culprit:
    """The culprit of `alarm`; the order of the witnesses does not matter."""
    seen = {witness.rank: witness for witness in sorted(witnesses, key=lambda witness: witness.rank)}
    facts = facts or HostFacts()
    verdicts = (
        _gone_node(alarm, seen),
        _first_death(seen, facts),
        _stopped(seen),
        _mismatch(seen),
        _waited_for(alarm, seen),
        _all_wait(seen),
        _by_stack(alarm, seen),
    )
    return next((verdict for verdict in verdicts if verdict is not None), None) or _nobody(alarm, seen, facts)


def _gone_node(alarm: Alarm, seen: Mapping[int, Witness]) -> Culprit | None:
    if alarm.kind != "node":
        return None
    nodes = nodes_of(seen, alarm.ranks)
    return Culprit(alarm.ranks, Cause.NODE_SILENT, "certain", alarm.reason, nodes=nodes, evidence=(alarm.reason,))


def _first_death(seen: Mapping[int, Witness], facts: HostFacts) -> Culprit | None:
    """The earliest end that is no complaint about somebody else; a signal before an error of the same moment."""
    dead = [witness for witness in seen.values() if ended_badly(witness) and not is_peer_error(witness)]
    if not dead:
        return None
    first_s = min(witness.exit_mono_s or 0.0 for witness in dead)
    together = [witness for witness in dead if (witness.exit_mono_s or 0.0) <= first_s + SAME_MOMENT_S]
    first = min(together, key=lambda one: (one.signal is None, one.exit_code not in DELIBERATE_CODES, one.exit_mono_s or 0.0))
    found = cause_of(first, facts=facts)
    tied = [one.rank for one in together if one.rank != first.rank and (one.signal is None) == (first.signal is None)]
    later = [one.rank for one in dead if one.rank != first.rank and one.rank not in tied]
    alternatives = [f"rank {rank} ended within {SAME_MOMENT_S:g} s of it" for rank in tied] + [
        f"rank {rank} ended after it" for rank in later
    ]
    return Culprit(
        (first.rank,),
        found.cause,
        "likely" if tied else "certain",
        found.reason,
        candidates=tuple(tied),
        nodes=nodes_of(seen, (first.rank,)),
        collective=pending_collective(seen.values()),
        evidence=evidence_lines(seen.values()),
        alternatives=tuple(alternatives),
        fingerprint=found.fingerprint,
    )


def _stopped(seen: Mapping[int, Witness]) -> Culprit | None:
    """By the kernel's word: a stopped or traced process runs nothing, whatever the others say about it."""
    ranks = tuple(witness.rank for witness in seen.values() if witness.process_state in ("T", "t"))
    if not ranks:
        return None
    reason = f"{named(seen, ranks)} {'is' if len(ranks) == 1 else 'are'} stopped (state {seen[ranks[0]].process_state})"
    return Culprit(
        ranks,
        Cause.STOPPED,
        "certain",
        while_waiting(reason, seen, ranks),
        nodes=nodes_of(seen, ranks),
        collective=pending_collective(seen.values()),
        evidence=evidence_lines(seen.values()),
    )


def _mismatch(seen: Mapping[int, Witness]) -> Culprit | None:
    """Two operations under one number of one group: both sides are named, the smaller one is blamed where there is a smaller one."""
    for name in group_names(seen):
        members = members_of(seen, name)
        top = max(state.last_enqueued for state in members.values())
        waiting = {rank: state for rank, state in members.items() if state.last_enqueued == top and state.last_completed < top}
        sides: dict[tuple[object, ...], list[int]] = {}
        for rank, state in waiting.items():
            sides.setdefault(signature_of(state), []).append(rank)
        if len(sides) < 2:
            continue
        told = {rank: operation_text(state) for rank, state in waiting.items()}
        return _two_sides(seen, sides.values(), told, f"mismatched collective {top} of group {name}", waiting)
    return None


def _two_sides(
    seen: Mapping[int, Witness], sides: Iterable[list[int]], told: Mapping[int, str], what: str, waiting: Mapping[int, GroupState]
) -> Culprit:
    """Nobody knows from outside which side is wrong, but one rank that does what no other does is the likelier one."""
    ordered = sorted(sides, key=lambda ranks: (len(ranks), ranks))
    blamed = ordered[0] if len(ordered[0]) < len(ordered[1]) else [rank for side in ordered for rank in side]
    return Culprit(
        tuple(sorted(blamed)),
        Cause.MISMATCHED_COLLECTIVE,
        "likely" if len(blamed) < len(waiting) else "inconclusive",
        f"{what}: {' while '.join(f'{named(seen, side)} called {told[side[0]]}' for side in ordered)}",
        candidates=tuple(sorted(set(waiting) - set(blamed))),
        nodes=nodes_of(seen, blamed),
        collective=waiting[ordered[-1][0]],
        evidence=evidence_lines(seen.values()),
        alternatives=("the larger side may be the wrong one: see the stacks of both",),
        fingerprint=f"mismatched {' against '.join(sorted({state.operation for state in waiting.values()}))}",
    )


def _waited_for(alarm: Alarm, seen: Mapping[int, Witness]) -> Culprit | None:
    """Follow who waits for whom to the ranks that are waited for and wait for nobody. A circle is an order of collectives that differs."""
    waits = {rank: missing_for(rank, seen) for rank in seen}
    awaited = {missing for ranks in waits.values() for missing in ranks}
    if not awaited:
        return None
    sinks = tuple(sorted(rank for rank in awaited if not waits.get(rank)))
    collective = pending_collective(witness for rank, witness in seen.items() if waits[rank])
    if not sinks:
        return _circle(seen, sorted(awaited))
    left = have_ended(seen, sinks)
    told = left or all(seen[rank].groups is not None for rank in sinks)  # else it is only silent, which a full machine can do to it
    what = f"{'is' if len(sinks) == 1 else 'are'} {'gone' if left else 'missing'}"
    found = cause_of_alarm(alarm)
    return Culprit(
        sinks,
        found.cause if found.cause != Cause.UNKNOWN else Cause.BEAT_LAPSE,
        "certain" if told and len(sinks) == 1 else "likely",
        while_waiting(f"{named(seen, sinks)} {what}", seen, sinks),
        nodes=nodes_of(seen, sinks),
        collective=collective,
        evidence=evidence_lines(seen.values()),
        alternatives=tuple(f"rank {rank} did not answer" for rank in sinks if rank in seen and seen[rank].groups is None),
        fingerprint=stack_fingerprint(seen, sinks),
    )


def _circle(seen: Mapping[int, Witness], ranks: Sequence[int]) -> Culprit:
    """Ranks that wait for each other in several groups: they do not call their collectives in one order."""
    waiting = {rank: waiting_in(seen[rank])[-1] for rank in ranks}
    sides: dict[tuple[str, str], list[int]] = {}
    for rank, state in waiting.items():
        sides.setdefault((state.name, state.operation), []).append(rank)
    told = {rank: collective_text(state) for rank, state in waiting.items()}
    return _two_sides(seen, sides.values(), told, "mismatched collectives", waiting)


def _all_wait(seen: Mapping[int, Witness]) -> Culprit | None:
    """Every rank is in the same collective, and it does not end: a link, or the library."""
    alive = [witness for witness in seen.values() if not ended_badly(witness)]
    collective = pending_collective(alive)
    if collective is None or not alive:
        return None
    states = [state_of(witness, collective.name) for witness in alive]
    if any(state is None or state.last_enqueued != collective.last_enqueued for state in states):
        return None
    ranks = tuple(witness.rank for witness in alive)
    if len(ranks) < 2:
        return None
    reason = f"all {len(ranks)} ranks wait in {collective_text(collective)}: the network or the library does not finish it"
    return Culprit(
        (),
        Cause.COLLECTIVE_TIMEOUT,
        "likely",
        reason,
        candidates=ranks,
        nodes=nodes_of(seen, ranks),
        collective=collective,
        evidence=evidence_lines(seen.values()),
        alternatives=("no rank is behind, so none is blamed: look at the links between these nodes",),
    )


def _by_stack(alarm: Alarm, seen: Mapping[int, Witness]) -> Culprit | None:
    """Without numbers: the one rank whose stack shows no collective while all others are in one."""
    with_stack = {rank: witness for rank, witness in seen.items() if witness.stack and not ended_badly(witness)}
    outside = [rank for rank, witness in with_stack.items() if not in_collective(witness.stack)]
    if len(with_stack) < 2 or len(outside) != 1 or len(with_stack) != len([one for one in seen.values() if not ended_badly(one)]):
        return None
    frame = with_stack[outside[0]].stack[0]
    return Culprit(
        tuple(outside),
        Cause.BEAT_LAPSE,
        "likely",
        f"{named(seen, outside)} is at {frame} while all others are in a collective",
        nodes=nodes_of(seen, outside),
        evidence=evidence_lines(seen.values()),
        alternatives=tuple(f"rank {rank} is in a collective" for rank in with_stack if rank not in outside),
        fingerprint=stack_fingerprint(seen, outside) or cause_of_alarm(alarm).fingerprint,
    )


def _nobody(alarm: Alarm, seen: Mapping[int, Witness], facts: HostFacts) -> Culprit:
    """What is left: a lone suspect is likely, several are candidates."""
    found = cause_of_alarm(alarm)
    accusers = [witness for witness in seen.values() if ended_badly(witness)]
    if alarm.kind in ("stopped", "silent") and len(alarm.ranks) == 1:
        return Culprit(
            alarm.ranks,
            found.cause,
            "likely",
            alarm.reason,
            nodes=nodes_of(seen, alarm.ranks),
            evidence=evidence_lines(seen.values()),
            fingerprint=stack_fingerprint(seen, alarm.ranks),
        )
    if accusers:
        found = cause_of(min(accusers, key=lambda one: one.exit_mono_s or 0.0), facts=facts)
    silent = tuple(rank for rank, witness in seen.items() if not ended_badly(witness) and witness.exit_code is None)
    candidates = silent if accusers and silent else alarm.ranks or tuple(seen)
    reason = f"{alarm.reason or found.reason}: nothing tells {named(seen, candidates)} apart"
    return Culprit((), found.cause, "inconclusive", reason, candidates=candidates, evidence=evidence_lines(seen.values()))
