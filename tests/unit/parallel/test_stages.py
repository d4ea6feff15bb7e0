"""How a model is dealt to the stages of a pipeline."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from surefoot.core.cut_plan import CutPlan
from surefoot.core.errors import ConfigError
from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model, cut_plan, materialise
from surefoot.parallel.pipeline import Order, num_scheduled
from surefoot.parallel.stages import deal_blocks, own_part, part_of, pieces_of

VOCAB_SIZE = 64


@pytest.mark.parametrize(
    ("num_blocks", "num_pieces", "dealt"),
    [
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (4, 4, [1, 1, 1, 1]),
        (5, 2, [3, 2]),  # the first of two has the extra one
        (12, 4, [3, 4, 3, 2]),  # 14 shares: 4, 4, 3, 3, of which the ends take one each
        (6, 4, [1, 2, 2, 1]),
        (32, 8, [4, 5, 4, 4, 4, 4, 4, 3]),
    ],
)
def test_the_ends_count_as_a_block_each(num_blocks: int, num_pieces: int, dealt: list[int]) -> None:
    assert deal_blocks(num_blocks, num_pieces=num_pieces) == dealt


def test_every_block_is_dealt_once_and_no_piece_goes_without() -> None:
    for num_blocks in range(1, 40):
        for num_pieces in range(1, num_blocks + 1):
            dealt = deal_blocks(num_blocks, num_pieces=num_pieces)
            assert sum(dealt) == num_blocks
            assert min(dealt) >= 1
            if num_pieces > 1:
                weights = [dealt[0] + 1, *dealt[1:-1], dealt[-1] + 1]
                assert max(weights) - min(weights) <= 1


def test_more_pieces_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 blocks cannot be dealt to 4 pieces"):
        deal_blocks(3, num_pieces=4)


def test_pieces_are_consecutive_and_neighbours_are_on_neighbouring_stages() -> None:
    plan = CutPlan(blocks=tuple(f"blocks.{index}" for index in range(6)), first=("embed",), last=("norm", "head"))
    pieces = pieces_of(plan, num_stages=2, num_chunks=2)
    assert [name for piece in pieces for name in piece.names] == ["embed", *plan.blocks, "norm", "head"]
    assert [piece.index % 2 for piece in pieces] == [0, 1, 0, 1]
    assert [(piece.is_first, piece.is_last) for piece in pieces] == [(True, False), (False, False), (False, False), (False, True)]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_pieces", [2, 3, 5])
def test_the_parts_of_a_model_one_after_the_other_are_the_model(num_pieces: int, tied: bool) -> None:
    section = ModelSection(num_layers=5, d_model=16, num_heads=2, d_ff=12, init_std=0.3, tie_embeddings=tied)
    model = build_model(section, VOCAB_SIZE, seed=1)
    materialise(model, seed=1, device=torch.device("cpu"))
    tokens_BS = torch.randint(0, VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(3))
    positions_BS = torch.arange(7).expand(2, 7)
    doc_ids_BS = (positions_BS > 3).long()
    pieces = pieces_of(cut_plan(model), num_stages=num_pieces, num_chunks=1)
    passed = tokens_BS
    for piece in pieces:
        passed = part_of(model, piece.names)(passed, positions_BS, doc_ids_BS)
    assert torch.equal(passed, model(tokens_BS, positions_BS, doc_ids_BS))


def test_a_part_owns_its_parameters_under_the_names_of_the_whole() -> None:
    model = build_model(ModelSection(num_layers=4, d_model=16, num_heads=2), VOCAB_SIZE, seed=1)
    whole = dict(model.named_parameters())
    pieces = pieces_of(cut_plan(model), num_stages=2, num_chunks=2)
    parts = [dict(own_part(model, pieces[stage::2]).named_parameters()) for stage in range(2)]
    assert parts[0].keys() | parts[1].keys() == whole.keys()
    assert {name.split(".")[1] for name in parts[1] if name.startswith("blocks.")} == {"1", "3"}
    assert all(parameter is whole[name] for part in parts for name, parameter in part.items())


def test_a_foreign_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="does not say how it is run piece by piece"):
        part_of(nn.Linear(2, 2), ["weight"])


@pytest.mark.parametrize(
    ("order", "num_atoms", "num_stages", "number"),
    [
        ("1f1b", 1, 4, 4),
        ("1f1b", 7, 4, 7),
        ("interleaved", 3, 4, 4),
        ("interleaved", 7, 4, 7),  # one round of seven
        ("interleaved", 9, 4, 10),  # two rounds of five
        ("zero_bubble", 5, 2, 6),
    ],
)
def test_a_schedule_is_filled_up_to_what_it_can_run(order: Order, num_atoms: int, num_stages: int, number: int) -> None:
    assert num_scheduled(num_atoms, num_stages=num_stages, order=order) == number


def test_a_schedule_never_gets_fewer_for_more() -> None:
    for num_stages in (2, 3, 4, 8):
        numbers = [num_scheduled(num_atoms, num_stages=num_stages, order="interleaved") for num_atoms in range(1, 70)]
        assert all(number >= num_atoms for num_atoms, number in enumerate(numbers, start=1))
        assert all(fewer <= more for fewer, more in pairwise(numbers))
