"""Which rank all others wait for, by the time that each spends outside collectives. Pure: the gathered figures of a step go in.

A step that waits for a rank is as long on every rank, so its length names nobody. What a rank does by itself, without what it spent waiting
for others, does. A finding must hold in both halves of the window: a file that is read for the first time, or a busy second, is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Cause = Literal["compute", "data", "link"]


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank in one step, in seconds: its forward and backward, how much of that waited for other ranks, and its wait for data."""

    forward_backward_s: float
    waited_s: float
    data_wait_s: float

    @property
    def compute_s(self) -> float:
        return max(0.0, self.forward_backward_s - self.waited_s)


@dataclass(frozen=True, slots=True)
class StragglerLimits:
    """As in [monitor]. `steady_share` of the steps of each half must show it one by one."""

    window_steps: int = 20
    factor: float = 1.15
    min_s: float = 0.01
    steady_share: float = 0.8


@dataclass(frozen=True, slots=True)
class Straggler:
    """`lost_s` per step is what all ranks would save; `factor` is the rank's median against that of the other ranks of its stage."""

    rank: int
    cause: Cause
    factor: float
    own_s: float
    others_s: float
    lost_s: float
    lost_share: float
    reason: str


@dataclass(frozen=True, slots=True)
class StragglerState:
    """The newest steps of one generation, oldest first, and whom they name."""

    generation: int = 0
    steps: tuple[tuple[RankTime, ...], ...] = ()
    named: tuple[Straggler, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """`found` are named with this step, `gone` were until the step before."""

    state: StragglerState
    found: tuple[Straggler, ...] = ()
    gone: tuple[Straggler, ...] = ()


def look(state: StragglerState, times: Sequence[RankTime], *, generation: int, num_stages: int, limits: StragglerLimits) -> Look:
    """The state after one more step. Another generation, or another number of ranks, begins anew.

    Ranks are compared with those of their own stage: the stages of a pipeline differ by design. `num_stages` divides the number of ranks,
    and stages are its consecutive blocks.
    """
    is_same = state.generation == generation and (not state.steps or len(state.steps[-1]) == len(times))
    if not is_same:
        state = StragglerState(generation)
    steps = (*state.steps, tuple(times))[-limits.window_steps :]
    if len(steps) < limits.window_steps:
        return Look(StragglerState(generation, steps, state.named))
    size = len(times) // num_stages
    named = [found for first in range(0, len(times), size) for found in _of_stage(steps, range(first, first + size), limits)]
    before, now = {was.rank: was for was in state.named}, {found.rank: found for found in named}
    # One that is told stays so until half of its excess is gone, else a rank at the limit would come and go.
    held = [was for rank, was in before.items() if rank not in now and _still(steps, was, size=size, limits=limits)]
    after = StragglerState(generation, steps, (*named, *held))
    gone = tuple(was for rank, was in before.items() if rank not in now and was not in held)
    return Look(after, tuple(found for found in named if found.rank not in before), gone)


def _of_stage(steps: Sequence[tuple[RankTime, ...]], ranks: range, limits: StragglerLimits) -> list[Straggler]:
    if len(ranks) < 2:
        return []
    found: list[Straggler] = []
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        for cause in ("compute", "data", "link"):
            if named := _judge(steps, rank, others, cause, limits):
                found.append(named)
                break  # a rank that computes for longer also takes longer in all
    return found


def _judge(
    steps: Sequence[tuple[RankTime, ...]], rank: int, others: Sequence[int], cause: Cause, limits: StragglerLimits
) -> Straggler | None:
    half = len(steps) // 2
    if not all(_is_slow(part, rank, others, cause, limits) for part in (steps[:half], steps[half:])):
        return None
    own_s = median(_figure(step[rank], cause) for step in steps)
    others_s = median(median(_figure(step[other], cause) for other in others) for step in steps)
    base_s = median(median(step[other].compute_s for other in others) for step in steps)
    step_s = median(step[rank].forward_backward_s + step[rank].data_wait_s for step in steps)
    lost_s, factor = own_s - others_s, (base_s + own_s - others_s) / base_s if base_s > 0 else float("inf")
    share = lost_s / step_s if step_s > 0 else 0.0
    what = {
        "compute": "computes for longer than its peers",
        "data": "waits longer for its data than its peers",
        "link": "computes as fast as its peers, but its collectives end later",
    }[cause]
    reason = (
        f"rank {rank} {what}: {own_s:.3f} s a step against {others_s:.3f} s over {len(steps)} steps; "
        f"all ranks lose {lost_s:.3f} s a step, {share:.0%} of their time"
    )
    return Straggler(rank, cause, factor, own_s, others_s, lost_s, share, reason)


def _is_slow(steps: Sequence[tuple[RankTime, ...]], rank: int, others: Sequence[int], cause: Cause, limits: StragglerLimits) -> bool:
    """Whether most steps, and their median, stand above the other ranks' median by the factor, of what these compute, and the seconds."""
    excesses = []
    for step in steps:
        base_s = median(step[other].compute_s for other in others)
        least_s = max(limits.min_s, (limits.factor - 1.0) * base_s)
        excesses.append(_figure(step[rank], cause) - median(_figure(step[other], cause) for other in others) - least_s)
    return median(excesses) >= 0.0 and sum(excess >= 0.0 for excess in excesses) >= limits.steady_share * len(excesses)


def _still(steps: Sequence[tuple[RankTime, ...]], was: Straggler, *, size: int, limits: StragglerLimits) -> bool:
    first = was.rank // size * size
    others = [other for other in range(first, first + size) if other != was.rank]
    newest = steps[len(steps) // 2 :]
    return median(
        _figure(step[was.rank], was.cause) - median(_figure(step[other], was.cause) for other in others) for step in newest
    ) >= 0.5 * max(limits.min_s, (limits.factor - 1.0) * was.others_s)


def _figure(time: RankTime, cause: Cause) -> float:
    if cause == "compute":
        return time.compute_s
    return time.data_wait_s if cause == "data" else time.forward_backward_s
