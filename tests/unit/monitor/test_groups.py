from __future__ import annotations

import pytest

from surefoot.monitor.groups import block_of, blocks_of, group_names

EMBED, NORM, HEAD = "embed.weight", "norm.weight", "head.weight"


def block(index: int) -> list[str]:
    return [f"blocks.{index}.attention.wq.weight", f"blocks.{index}.norm.weight"]


WHOLE = [EMBED, *block(0), *block(1), *block(2), *block(3), NORM, HEAD]


@pytest.mark.parametrize(
    "held_by_ranks",
    [
        [WHOLE],
        [WHOLE, WHOLE],
        [[EMBED, *block(0), *block(1)], [*block(2), *block(3), NORM, HEAD]],
        [[EMBED, *block(0), *block(2)], [*block(1), *block(3), NORM, HEAD]],
        [[EMBED, *block(0)], [*block(1)], [*block(2)], [EMBED, *block(3), NORM, HEAD]],
    ],
    ids=["one", "copies", "1f1b", "interleaved", "tied"],
)
def test_groups_are_those_of_the_whole_model_however_it_is_cut(held_by_ranks: list[list[str]]) -> None:
    grouped = group_names(held_by_ranks)
    assert list(dict.fromkeys(grouped.values())) == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm+head"]
    assert set(grouped) == set(WHOLE)
    assert grouped == group_names([WHOLE])


def test_names_of_other_models() -> None:
    llama = ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.10.mlp.weight", "model.layers.2.mlp.weight"]
    grouped = group_names([[*llama, "model.norm.weight", "lm_head.weight"]])
    assert list(dict.fromkeys(grouped.values())) == [
        "model.embed_tokens", "model.layers.0", "model.layers.2", "model.layers.10", "model.norm+lm_head",
    ]  # fmt: skip
    assert group_names([["0.weight", "0.bias", "2.weight"]]) == {"0.weight": "0", "0.bias": "0", "2.weight": "2"}
    many = group_names([["a.w", "b.w", "c.w", "d.w", "e"]])
    assert set(many.values()) == {"a+b+c+"}
    assert group_names([]) == {}


@pytest.mark.parametrize(("num_blocks", "size"), [(62, 1), (63, 2), (200, 4)])
def test_many_blocks_are_joined_with_their_neighbours(num_blocks: int, size: int) -> None:
    grouped = group_names([[EMBED, *(name for index in range(num_blocks) for name in block(index)), NORM]])
    groups = list(dict.fromkeys(grouped.values()))
    assert len(groups) <= 64
    assert groups[1] == ("blocks.0" if size == 1 else f"blocks.0-{size - 1}")
    assert {grouped[name] for name in block(size - 1)} == {groups[1]}
    assert blocks_of(grouped)[f"blocks.{num_blocks - 1}"] == groups[-2]


def test_a_block_is_a_path_up_to_its_first_number() -> None:
    assert block_of("blocks.3.experts.5.weight") == "blocks.3"
    assert block_of("norm.weight") is None
