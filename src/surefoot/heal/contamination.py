"""Which checkpoints a bad stretch of training got into, where to go back to, and whether one must: pure, from what the ledger says.

A checkpoint of step s holds the updates 1 to s. So everything at or after the first bad step is affected, however good its bytes are; the
one just before it is clean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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


SALVAGE_SIGMAS: Final = 2.0
NUM_FORETELLING, NUM_FORETELLING_LEAST = 8, 4
"""Evaluations before the window that the path is drawn through: the newest ones, for the loss falls along no line for long. A line through
three leaves one deviation, which is no measure of noise."""


@dataclass(frozen=True, slots=True)
class Salvage:
    """Whether the state of now may be kept all the same. `largest_sigmas`: how far above its expected path the frozen loss came at most."""

    may_be_kept: bool
    num_before: int
    num_after: int
    largest_sigmas: float | None
    reason: str


def salvage(path: Sequence[tuple[int, float]], *, first_step: int) -> Salvage:
    """From the losses on the frozen set, as (step, nats per token): a person may keep what stands where a clean run would stand.

    The path before `first_step` goes on as a line; its noise, and how little is known of the line so far ahead, make the deviation. That
    training forgot a small wrong step is possible, and no proof that it did: it is never proposed without evaluations on both sides.
    """
    finite = sorted((step, loss) for step, loss in path if math.isfinite(loss))
    before = [point for point in finite if point[0] < first_step][-NUM_FORETELLING:]
    after = [point for point in path if point[0] >= first_step]
    if len(before) < NUM_FORETELLING_LEAST or not after:
        reason = f"the frozen set was evaluated {len(before)} times before step {first_step} and {len(after)} times since"
        return Salvage(False, len(before), len(after), None, f"{reason}: too few to say what would have been")
    largest = max(_sigmas_above(before, point) for point in after)
    if not largest <= SALVAGE_SIGMAS:
        reason = f"the frozen loss came {largest:.1f} deviations above where {len(before)} evaluations before it lead"
        return Salvage(False, len(before), len(after), largest if math.isfinite(largest) else None, reason)
    reason = (
        f"the frozen loss stayed within {SALVAGE_SIGMAS:g} deviations of where {len(before)} evaluations before it lead "
        f"({largest:+.1f} at most, {len(after)} evaluations): it may be kept, if its cause is known and over"
    )
    return Salvage(True, len(before), len(after), largest, reason)


def _sigmas_above(before: Sequence[tuple[int, float]], point: tuple[int, float]) -> float:
    """In standard errors of the prediction of one new value by the line through `before`. Inf for what is not finite."""
    step, loss = point
    if not math.isfinite(loss):
        return math.inf
    steps, losses = [float(known) for known, _ in before], [known for _, known in before]
    slope, intercept = statistics.linear_regression(steps, losses)
    squares = sum((known - (slope * at + intercept)) ** 2 for at, known in zip(steps, losses, strict=True))
    middle = statistics.fmean(steps)
    leverage = 1 / len(steps) + (step - middle) ** 2 / sum((at - middle) ** 2 for at in steps)
    deviation = math.sqrt(squares / (len(steps) - 2) * (1 + leverage))
    above = loss - (slope * step + intercept)
    return above / deviation if deviation > 0 else math.copysign(math.inf, above) if above else 0.0


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
