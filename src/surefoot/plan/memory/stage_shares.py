"""What each stage of a pipeline has of a model, and how many micro-batches it keeps at once. Pure; cached, for a search asks often."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from surefoot.core.errors import PlanInfeasible
from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.memory.implementations import Balance
from surefoot.plan.records import PipelineSchedule


class StageShare(NamedTuple):
    """`pieces`: layers of each, the most first."""

    num_layers: int
    pieces: tuple[int, ...]
    has_first: bool
    has_last: bool


@lru_cache(maxsize=1024)
def stage_shares(sizes: ModelSizes, *, pp: int, chunks: int, balance: Balance) -> tuple[StageShare, ...]:
    """Of each of `pp` stages; piece p of the model is on stage p mod pp. Raises PlanInfeasible where a piece would have no layer."""
    num_pieces = pp * chunks
    if sizes.num_layers < num_pieces:
        raise PlanInfeasible(
            f"{sizes.num_layers} layers cannot be dealt to {num_pieces} pieces",
            where="pp",
            hint="at least one layer a piece: fewer stages or chunks",
            got=num_pieces,
            limit=sizes.num_layers,
        )
    dealt = _by_flops(sizes, num_pieces) if balance == "flops" else _by_blocks(sizes.num_layers, num_pieces, ends=balance == "blocks")
    pieces = [tuple(sorted(dealt[stage::pp], reverse=True)) for stage in range(pp)]
    return tuple(StageShare(sum(own), own, stage == 0, stage == pp - 1) for stage, own in enumerate(pieces))


def _by_blocks(num_layers: int, num_pieces: int, *, ends: bool) -> list[int]:
    """Layers of each piece: equal but for one, the earlier ones have more. With `ends` embedding and head count as a layer each."""
    share, rest = divmod(num_layers + 2 * ends, num_pieces)
    dealt = [share + (index < rest) for index in range(num_pieces)]
    if ends:
        dealt[0] -= 1
        dealt[-1] -= 1
    while 0 in dealt:
        dealt[dealt.index(max(dealt))] -= 1
        dealt[dealt.index(0)] += 1
    return dealt


def _by_flops(sizes: ModelSizes, num_pieces: int) -> list[int]:
    """A piece ends with the layer or head that takes it past its part of all products, as nanotron's builder does; embedding and norms
    cost nothing. The last piece may be left with the head alone."""
    layer = sizes.attention_matrices + sizes.expert_matrices * max(1, sizes.experts_per_token + sizes.num_shared_experts)
    costs = [layer] * sizes.num_layers + [sizes.vocab_size * sizes.d_model]
    dealt = [0] * num_pieces
    piece = 0
    for index, reached in enumerate(accumulate(costs)):
        if index < sizes.num_layers:
            dealt[piece] += 1
        if reached * num_pieces > sum(costs) * (piece + 1):
            piece = min(piece + 1, num_pieces - 1)
    return dealt


class InFlight(NamedTuple):
    """At most, on one stage: forwards of pieces whose backward is still to come, and layers of them."""

    chunks: int
    layers: int


def in_flight(stage: int, share: StageShare, *, pp: int, num_micro_batches: int, schedule: PipelineSchedule) -> InFlight:
    """1F1B: the stages that are left (arXiv 2104.04473). Interleaved: its warm-up, which on the first stage comes to
    1 + (p - 1) / (p v) times 1F1B (arXiv 2205.05198). Zero-bubble (H1, arXiv 2401.10241) holds back its gradients of weights, so that every
    stage keeps what the first does.
    """
    pieces, behind = share.pieces, pp - 1 - stage
    if schedule == "1f1b":
        number = min(behind + 1, num_micro_batches)
        return InFlight(number, number * share.num_layers)
    # A piece takes a round of micro-batches, about as many as there are stages, before the next one does.
    rounds = num_micro_batches // max(1, num_micro_batches // pp)
    more = 2 * behind + 1 if schedule == "interleaved" else pp
    chunks = min((len(pieces) - 1) * rounds + more, num_micro_batches * len(pieces))
    if pieces[0] == pieces[-1]:
        return InFlight(chunks, chunks * pieces[0])
    # The most layers are there when the heaviest piece has begun its next round.
    first = min(chunks, rounds + more, num_micro_batches)
    layers, left = first * pieces[0], chunks - first
    for size in pieces[1:]:
        layers += min(left, rounds) * size
        left -= min(left, rounds)
    return InFlight(chunks, layers)


@lru_cache(maxsize=1024)
def heaviest_candidates(sizes: ModelSizes, *, pp: int, chunks: int, balance: Balance) -> tuple[int, ...]:
    """Stages among which the one that needs most is: the ends, and inner ones that no earlier inner one has as many layers as."""
    shares = stage_shares(sizes, pp=pp, chunks=chunks, balance=balance)
    found = [0] if pp == 1 else [0, pp - 1]
    most = 0
    for stage in range(1, pp - 1):
        if shares[stage].num_layers > most:
            most = shares[stage].num_layers
            found.append(stage)
    return tuple(found)
