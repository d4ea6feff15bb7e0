from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from surefoot.core.model_sizes import ModelSizes
from surefoot.parallel.stages import deal_blocks
from surefoot.plan.memory.stage_shares import InFlight, StageShare, in_flight, stage_shares

SIZES = ModelSizes(131072, 32, 4096, 32, 32, 128, 14336, 0, False, False)


def test_blocks_are_dealt_as_training_deals_them() -> None:
    for num_layers, pp, chunks in itertools.product(range(1, 40), range(1, 9), range(1, 4)):
        if num_layers >= pp * chunks:
            shares = stage_shares(replace(SIZES, num_layers=num_layers), pp=pp, chunks=chunks, balance="blocks")
            dealt = deal_blocks(num_layers, num_pieces=pp * chunks)
            assert [share.pieces for share in shares] == [tuple(sorted(dealt[stage::pp], reverse=True)) for stage in range(pp)]


@pytest.mark.parametrize("balance", ["blocks", "flops", "even"])
def test_every_layer_is_somewhere_and_the_ends_are_where_they_belong(balance: Any) -> None:
    for pp, chunks in itertools.product((1, 2, 3, 8), (1, 2)):
        shares = stage_shares(SIZES, pp=pp, chunks=chunks, balance=balance)
        assert sum(share.num_layers for share in shares) == 32
        assert [share.has_first for share in shares] == [True] + [False] * (pp - 1)
        assert [share.has_last for share in shares] == [False] * (pp - 1) + [True]


def test_a_large_head_takes_the_place_of_layers_where_flops_are_balanced() -> None:
    """Of 8.9B parameters with 131,072 tokens the head is 2.2 layers: 34.2 in all, and the 18th passes the half."""
    assert [share.num_layers for share in stage_shares(SIZES, pp=2, chunks=1, balance="flops")] == [18, 14]


def played(*, pp: int, chunks: int, stage: int, num_micro_batches: int, pieces: tuple[int, ...]) -> InFlight:
    """The interleaved schedule of arXiv 2104.04473 op by op: rounds of pp micro-batches, a warm-up, then forward and backward in turn."""
    total = num_micro_batches * chunks
    forwards = [(index // pp) % chunks for index in range(total)]
    backwards = [chunks - 1 - piece for piece in forwards]
    warm_up = min((chunks - 1) * pp + 2 * (pp - 1 - stage), total)
    alive: Counter[int] = Counter()
    most_chunks = most_layers = 0
    for index, piece in enumerate(forwards):
        alive[piece] += 1
        most_chunks = max(most_chunks, alive.total())
        most_layers = max(most_layers, sum(pieces[one] * number for one, number in alive.items()))
        if index >= warm_up:
            alive[backwards[index - warm_up]] -= 1
    return InFlight(most_chunks, most_layers)


@pytest.mark.parametrize(("pp", "chunks", "rounds"), list(itertools.product((2, 4), (2, 3), (1, 2, 4))))
def test_interleaved_stages_keep_what_the_schedule_played_out_keeps(pp: int, chunks: int, rounds: int) -> None:
    for stage in range(pp):
        pieces = (3,) * chunks
        told = in_flight(stage, StageShare(3 * chunks, pieces, False, False), pp=pp, num_micro_batches=rounds * pp, schedule="interleaved")
        assert told == played(pp=pp, chunks=chunks, stage=stage, num_micro_batches=rounds * pp, pieces=pieces)


@pytest.mark.parametrize(("rounds", "num_layers"), [(1, 7), (2, 9), (4, 9)])
def test_uneven_pieces_are_counted_at_the_moment_when_the_heavier_are_there(rounds: int, num_layers: int) -> None:
    told = in_flight(1, StageShare(4, (3, 1), False, True), pp=2, num_micro_batches=2 * rounds, schedule="interleaved")
    assert told == InFlight(3, num_layers)
    assert played(pp=2, chunks=2, stage=1, num_micro_batches=2 * rounds, pieces=(3, 1)) == told
