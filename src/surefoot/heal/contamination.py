"""Which checkpoints a bad stretch of training got into, and where to go back to: pure, from what the ledger says.

A checkpoint of step s holds the updates 1 to s. So everything at or after the first bad step is affected, however good its bytes are; the
one just before it is clean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from surefoot.core.records import CheckpointRef, Rung


@dataclass(frozen=True, slots=True)
class WayBack:
    """A clean checkpoint and what it costs: the steps that must be trained again. `proven_elsewhere`: by a node that did not write it."""

    id: str
    step: int
    rung: Rung
    proven_elsewhere: bool
    cost_steps: int


@dataclass(frozen=True, slots=True)
class Contamination:
    """`newest` loses the fewest steps; `choice` is the one to take, and `reason` why."""

    first_step: int
    last_step: int
    affected: tuple[str, ...]
    clean: tuple[str, ...]
    newest: WayBack | None
    choice: WayBack | None
    reason: str


def contaminated(
    refs: Sequence[CheckpointRef],
    *,
    first_step: int,
    last_step: int,
    step: int,
    proven_on: Mapping[str, Collection[str]] | None = None,
    written_on: Mapping[str, Collection[str]] | None = None,
) -> Contamination:
    """What the training steps `first_step` to `last_step` got into. `refs`: those that are there; `step`: where the run is now.

    Clean are those of the present line before the window; one of an abandoned branch may hold other steps of the same numbers, so it is
    never a way back. Suspect and damaged ones are none either. The choice is the newest that another node has proven (a node that computes
    wrongly proves its own work right), else the newest proven, else the newest; `proven_on` and `written_on` are hosts by id.
    """
    affected = tuple(ref.id for ref in refs if ref.step >= first_step)
    clean = [ref for ref in refs if ref.step < first_step and not (ref.abandoned or ref.suspect or ref.damaged)]
    ways = [_way_back(ref, step=step, proven_on=proven_on or {}, written_on=written_on or {}) for ref in clean]
    ways.sort(key=lambda way: way.step)
    newest = ways[-1] if ways else None
    proven = [way for way in ways if way.rung is Rung.PROVEN]
    elsewhere = [way for way in proven if way.proven_elsewhere]
    choice = next((kind[-1] for kind in (elsewhere, proven, ways) if kind), None)
    return Contamination(
        first_step, last_step, affected, tuple(ref.id for ref in clean), newest, choice, _reason(choice, newest, first_step=first_step)
    )


def _way_back(
    ref: CheckpointRef, *, step: int, proven_on: Mapping[str, Collection[str]], written_on: Mapping[str, Collection[str]]
) -> WayBack:
    provers, writers = set(proven_on.get(ref.id, ())), set(written_on.get(ref.id, ()))
    return WayBack(ref.id, ref.step, ref.rung, bool(writers and provers - writers), max(0, step - ref.step))


def _reason(choice: WayBack | None, newest: WayBack | None, *, first_step: int) -> str:
    if choice is None or newest is None:
        return f"no checkpoint from before step {first_step} is left: only a fresh start is clean"
    how = "the newest clean one that another node has proven" if choice.proven_elsewhere else f"the newest clean one that is {choice.rung}"
    if choice == newest:
        return f"{how}: {choice.cost_steps} steps are trained again"
    return (
        f"{how}: {choice.cost_steps} steps are trained again; {newest.id} would cost {newest.cost_steps}, but is only {newest.rung}"
        f"{' by the node that wrote it' if newest.rung is Rung.PROVEN else ''}"
    )
