"""Keyed streams: a draw is a function of its key. That initial values do not depend on the mesh is shown on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.tensors.random import Constant, InitRule, Normal, RandomKey, generator_for, initial_values, initialise


def draw(generator: torch.Generator) -> list[float]:
    values: list[float] = torch.rand(4, generator=generator).tolist()
    return values


def rule_for(fqn: str) -> InitRule:
    return Constant(1.0) if fqn.endswith("bias") else Normal(0.02)


def whole_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))


def test_the_same_key_starts_the_same_stream() -> None:
    assert draw(generator_for(7, "dropout", 3)) == draw(generator_for(7, "dropout", 3))


@pytest.mark.parametrize("other", [(8, "dropout", 3), (7, "drop", 3), (7, "dropout", 4), (7, "dropout", "3"), (7, "dropout")])
def test_another_key_is_another_stream(other: tuple[int | str, ...]) -> None:
    seed, *parts = other
    assert draw(generator_for(int(seed), *parts)) != draw(generator_for(7, "dropout", 3))


def test_a_stream_neither_reads_nor_moves_the_global_one() -> None:
    before = torch.get_rng_state()
    first = draw(generator_for(1, "a"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert draw(generator_for(1, "a")) == first


def test_a_random_key_folds_to_the_same_draws_whatever_was_drawn_before() -> None:
    key = RandomKey(seed=1, step=10, atom=2)
    wanted = draw(key.fold(0, "dropout"))
    draw(key.fold(1, "dropout"))
    assert draw(key.fold(0, "dropout")) == wanted
    others = [
        RandomKey(seed=2, step=10, atom=2).fold(0, "dropout"),
        RandomKey(seed=1, step=11, atom=2).fold(0, "dropout"),
        RandomKey(seed=1, step=10, atom=3).fold(0, "dropout"),
        key.fold(1, "dropout"),
        key.fold(0, "noise"),
    ]
    assert wanted not in [draw(other) for other in others]


def test_initial_values_follow_their_rule() -> None:
    values = initial_values(0, "w", shape=torch.Size([400, 300]), rule=Normal(0.5))
    assert values.dtype == torch.float32
    assert abs(values.mean().item()) < 0.01
    assert abs(values.std().item() - 0.5) < 0.01
    assert torch.equal(initial_values(0, "w", shape=torch.Size([3]), rule=Constant(2.0)), torch.full((3,), 2.0))


def test_initial_values_are_keyed_by_all_64_bits_of_seed_and_name() -> None:
    shape, rule = torch.Size([8]), Normal(1.0)
    base = initial_values(0, "w", shape=shape, rule=rule)
    assert torch.equal(initial_values(0, "w", shape=shape, rule=rule), base)
    for seed, fqn in ((1, "w"), (2**32, "w"), (0, "v")):
        assert not torch.equal(initial_values(seed, fqn, shape=shape, rule=rule), base)


def test_initialise_is_a_function_of_names_not_of_what_was_there_or_of_threads() -> None:
    first, second = whole_model(), whole_model()
    initialise(first, seed=3, rule_for=rule_for)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    initialise(second, seed=3, rule_for=rule_for)
    torch.set_num_threads(threads)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(first[0].bias, torch.ones(7))  # type: ignore[index]  # Sequential


def test_initialise_fills_a_tied_parameter_once_under_its_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

    tied = Tied()
    initialise(tied, seed=0, rule_for=rule_for)
    assert torch.equal(tied.b.weight, initial_values(0, "a.weight", shape=torch.Size([4, 4]), rule=Normal(0.02)))
