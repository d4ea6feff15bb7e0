"""Data, state or hardware: what the repetitions of an ill step say. Pure, from figures that every rank holds.

The same batch with the same keys and weights gives the same bits. So what differs in a repetition on the same ranks was a transient fault
of the rank whose figures differ. What recurs is tried once more with all atoms moved on by one rank: figures that move with their atoms
belong to the data or to the weights; figures that do not belong to a rank.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.core.records import Signals

Cause = Literal["data", "state", "hardware", "schedule", "inconclusive"]

KNOWN_CAUSES: Mapping[str, Cause] = {
    "lr_not_applied": "schedule",
    "lr_jump": "schedule",
    "replica_differs": "hardware",
    "recompute_differs": "hardware",
    "state_is_ill": "state",
}
"""Rules whose cause is known before any repetition, and is no batch: that only tells a fault that is over from one that stays."""


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank made of its atoms: nats and live tokens, and the norm of its own gradient (nan where nobody measures it)."""

    loss_sum: float
    num_live_tokens: int
    local_norm: float


@dataclass(frozen=True, slots=True)
class Run:
    """One computation of the step: by how many ranks its atoms were moved on, what each rank made of them, and the global norm."""

    rotation: int
    ranks: tuple[RankFigures, ...]
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`ranks` are the named ones; several, or none, where the cause is inconclusive."""

    cause: Cause
    reason: str
    ranks: tuple[int, ...] = ()
    is_transient: bool = False


def run_of(signals: Signals, *, rotation: int) -> Run:
    figures = tuple(RankFigures(part.loss_sum, part.num_live_tokens, part.local_norm) for part in signals.ranks)
    return Run(rotation, figures, signals.grad_norm)


def compare_repetition(first: Run, again: Run) -> Diagnosis | None:
    """What two computations on the same ranks say; None when they are the same bits, so that what was seen recurs.

    A fault strikes few ranks at once: where half of them differ or more, bits do not repeat here.
    """
    ranks = tuple(rank for rank, (was, now) in enumerate(zip(first.ranks, again.ranks, strict=True)) if _bits(was) != _bits(now))
    if not ranks:
        if _word(first.grad_norm) == _word(again.grad_norm):
            return None
        reason = "repeated on the same ranks it gives another gradient norm, and no rank's own figures differ"
        return Diagnosis(
            "hardware" if len(first.ranks) == 1 else "inconclusive", reason, _all(first)[:1] if len(first.ranks) == 1 else (), True
        )
    if 2 * len(ranks) >= len(first.ranks) > 1:
        reason = f"repeated on the same ranks {len(ranks)} of {len(first.ranks)} give other figures: bits do not repeat here"
        return Diagnosis("inconclusive", reason, ranks, True)
    return Diagnosis("hardware", f"repeated on the same ranks, {_names(ranks)} gives other figures", ranks, True)


def compare_rotated(again: Run, rotated: Run, *, tolerance: float = 0.0) -> Diagnosis | None:
    """What a computation says whose atoms moved on by one rank; None when each rank's figures moved with its atoms.

    Bits are asked, or, where weights are alike but not the same, figures within a relative `tolerance`.

    A rank that computes wrongly is in two of the pairs (rank before, rank after): with three ranks and more it is the one that they share.
    """
    num_ranks = len(again.ranks)
    wrong = [rank for rank in range(num_ranks) if not _alike(again.ranks[rank], rotated.ranks[(rank + 1) % num_ranks], tolerance)]
    if not wrong:
        return None
    shared = set(_all(again))
    for rank in wrong:
        shared &= {rank, (rank + 1) % num_ranks}
    if len(shared) == 1:
        (culprit,) = shared
        return Diagnosis(
            "hardware", f"the figures do not move with the atoms: rank {culprit} makes others of them than its neighbours", (culprit,)
        )
    candidates = tuple(sorted({member for rank in wrong for member in (rank, (rank + 1) % num_ranks)}))
    reason = f"the figures do not move with the atoms, and {_names(candidates)} cannot be told apart"
    return Diagnosis("inconclusive", reason, candidates)


def data_or_state(run: Run, *, ill_ranks: Sequence[int], canary_is_high: bool | None) -> Diagnosis:
    """What recurs wherever it is computed: the batch, or the weights that it meets.

    A frozen held-out set that is as good as before says that the weights are well. Without one, atoms of some ranks alone speak for the
    data, and of all ranks for the weights; of one rank nothing can be said.
    """
    if canary_is_high is not None:
        cause: Cause = "state" if canary_is_high else "data"
        reason = "the canary is up too: the weights are ill" if canary_is_high else "the canary is as good as before: the weights are well"
        return Diagnosis(cause, f"it recurs with the same batch, and {reason}", tuple(ill_ranks))
    if len(run.ranks) == 1:
        return Diagnosis("inconclusive", "it recurs with the same batch; without a canary one rank cannot tell data from state")
    if 0 < len(ill_ranks) < len(run.ranks):
        return Diagnosis("data", f"it recurs with the same batch, and only the atoms of {_names(ill_ranks)} show it", tuple(ill_ranks))
    return Diagnosis("state", "it recurs with the same batch, on the atoms of all ranks alike")


def _all(run: Run) -> tuple[int, ...]:
    return tuple(range(len(run.ranks)))


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _word(value: float) -> bytes:
    return struct.pack(">d", value) if value == value else b"nan"


def _bits(figures: RankFigures) -> tuple[bytes, int, bytes]:
    return _word(figures.loss_sum), figures.num_live_tokens, _word(figures.local_norm)


def _alike(one: RankFigures, other: RankFigures, tolerance: float) -> bool:
    if _bits(one) == _bits(other):
        return True
    pairs = ((one.loss_sum, other.loss_sum), (one.local_norm, other.local_norm))
    return one.num_live_tokens == other.num_live_tokens and all(
        _word(was) == _word(now) or math.isclose(was, now, rel_tol=tolerance, abs_tol=0.0) for was, now in pairs
    )
