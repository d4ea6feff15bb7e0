"""A pipeline schedule played out: what each rank does in which order, when it can, and how long it idles. Pure.

The orders are those of torch's Schedule1F1B, ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble, which surefoot trains with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from surefoot.plan.layouts.pipeline_schedule import num_scheduled
from surefoot.plan.records import PipelineSchedule

Kind = Literal["forward", "backward", "weight"]


NUM_ROUNDS_PLAYED = 5
"""A pipeline is full after two."""


class Op(NamedTuple):
    """`piece` among all p v of them; piece i is on rank i mod p. Under zero-bubble "backward" is the half that the one before waits for."""

    kind: Kind
    piece: int
    micro_batch: int


class PieceTimes(NamedTuple):
    """Seconds of one micro-batch through one piece. `weight_s` counts only under zero-bubble; else it is part of the backward."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """`busy_s` by rank. `peak_in_flight`: by rank, forwards whose backward is still to come, in pieces; divided by v, whole stages."""

    total_s: float
    busy_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]

    @property
    def idle_of_total(self) -> float:
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.total_s)

    @property
    def idle_of_ideal(self) -> float:
        """Over the time that the same work takes with no rank waiting."""
        return len(self.busy_s) * self.total_s / sum(self.busy_s) - 1.0


@lru_cache(maxsize=256)
def simulate(
    times: tuple[PieceTimes, ...], *, pp: int, num_micro_batches: int, schedule: PipelineSchedule = "1f1b", p2p_s: float = 0.0
) -> Timeline:
    """`times` of all p v pieces, in the order of the model. What passes to another rank arrives `p2p_s` later; sending keeps nobody busy.

    Micro-batches are filled up with phantoms where the schedule needs more.
    """
    number = num_scheduled(num_micro_batches, pp=pp, schedule=schedule) if pp > 1 else num_micro_batches
    orders = [list(_order(rank, pp=pp, chunks=len(times) // pp, num_micro_batches=number, schedule=schedule)) for rank in range(pp)]
    split = schedule == "zero_bubble" and pp > 1
    return _play(orders, _durations(times, split=split), p2p_s=p2p_s if pp > 1 else 0.0)


def play_out(times: tuple[PieceTimes, ...], *, pp: int, num_micro_batches: int, schedule: PipelineSchedule, p2p_s: float) -> Timeline:
    """As `simulate`, and as quick for thousands of micro-batches: a full pipeline repeats itself from round to round of p of them."""
    whole = num_micro_batches // pp
    if num_micro_batches % pp or whole <= NUM_ROUNDS_PLAYED:
        return simulate(times, pp=pp, num_micro_batches=num_micro_batches, schedule=schedule, p2p_s=p2p_s)
    fewer, more = (
        simulate(times, pp=pp, num_micro_batches=rounds * pp, schedule=schedule, p2p_s=p2p_s)
        for rounds in (NUM_ROUNDS_PLAYED - 1, NUM_ROUNDS_PLAYED)
    )
    left = whole - NUM_ROUNDS_PLAYED
    total_s = more.total_s + left * (more.total_s - fewer.total_s)
    busy_s = tuple(last + left * (last - first) for first, last in zip(fewer.busy_s, more.busy_s, strict=True))
    return Timeline(total_s, busy_s, more.peak_in_flight)


def _durations(times: Sequence[PieceTimes], *, split: bool) -> dict[tuple[Kind, int], float]:
    told: dict[tuple[Kind, int], float] = {}
    for piece, (forward_s, backward_s, weight_s) in enumerate(times):
        told["forward", piece] = forward_s
        told["backward", piece] = backward_s if split else backward_s + weight_s
        told["weight", piece] = weight_s
    return told


def _order(rank: int, *, pp: int, chunks: int, num_micro_batches: int, schedule: PipelineSchedule) -> Iterator[Op]:
    """Forwards to fill up, then a forward and a backward in turn, then the backwards that are left. Weight gradients run `rank` behind."""
    number = num_micro_batches * chunks
    in_round = num_micro_batches // max(1, num_micro_batches // pp)
    lead = {"1f1b": 1, "interleaved": 2, "zero_bubble": 1}[schedule]
    warm_up = min((chunks - 1) * in_round + lead * (pp - 1 - rank), number)
    split = schedule == "zero_bubble" and pp > 1
    for index in range(warm_up):
        yield _op("forward", index, rank, pp=pp, chunks=chunks, in_round=in_round)
    for index in range(number):
        if warm_up + index < number:
            yield _op("forward", warm_up + index, rank, pp=pp, chunks=chunks, in_round=in_round)
        yield _op("backward", index, rank, pp=pp, chunks=chunks, in_round=in_round)
        if split and index >= rank:
            yield _op("weight", index - rank, rank, pp=pp, chunks=chunks, in_round=in_round)
    if split:
        for index in range(max(0, number - rank), number):
            yield _op("weight", index, rank, pp=pp, chunks=chunks, in_round=in_round)


def _op(kind: Kind, index: int, rank: int, *, pp: int, chunks: int, in_round: int) -> Op:
    """The `index`-th of its kind on `rank`: a round of micro-batches through one chunk, then through the next; backwards the other way."""
    turn, place = divmod(index, in_round)
    round_, chunk = divmod(turn, chunks)
    if kind != "forward":
        chunk = chunks - 1 - chunk
    return Op(kind, chunk * pp + rank, round_ * in_round + place)


def _play(orders: Sequence[Sequence[Op]], durations: dict[tuple[Kind, int], float], *, p2p_s: float) -> Timeline:
    pp, num_pieces = len(orders), 1 + max(op.piece for order in orders for op in order)
    ended: dict[Op, float] = {}
    at, clock, busy, flying, peak = [0] * pp, [0.0] * pp, [0.0] * pp, [0] * pp, [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                op = order[at[rank]]
                needs = _needs(op, num_pieces)
                if needs is not None and needs not in ended:
                    break
                ready = 0.0 if needs is None else ended[needs] + (p2p_s if needs.piece != op.piece else 0.0)
                lasts = durations[op.kind, op.piece]
                clock[rank] = ended[op] = max(clock[rank], ready) + lasts
                busy[rank] += lasts
                flying[rank] += {"forward": 1, "backward": -1, "weight": 0}[op.kind]
                peak[rank] = max(peak[rank], flying[rank])
                at[rank] += 1
                moved = True
    assert all(at[rank] == len(order) for rank, order in enumerate(orders)), "a schedule of torch's does not wait for itself"
    return Timeline(max(clock), tuple(busy), tuple(peak))


def _needs(op: Op, num_pieces: int) -> Op | None:
    """What has to be over before: the piece before, or behind in a backward, which begins at the end of the last piece's forward."""
    if op.kind == "forward":
        return Op("forward", op.piece - 1, op.micro_batch) if op.piece else None
    if op.kind == "weight":
        return Op("backward", op.piece, op.micro_batch)
    return Op("backward", op.piece + 1, op.micro_batch) if op.piece + 1 < num_pieces else Op("forward", op.piece, op.micro_batch)
