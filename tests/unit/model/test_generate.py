"""The text sample: a function of its arguments, inside its vocabulary and its context."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from surefoot.core.sections import ModelSection
from surefoot.model.generate import generate
from surefoot.model.transformer import Transformer

MakeModel = Callable[[ModelSection], Transformer]


def counting(tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
    """A model that is sure of the next number, and surer still of an id past the vocabulary."""
    logits_BSV = torch.nn.functional.one_hot((tokens_BS + 1) % 10, 12).float() * 50
    logits_BSV[..., 11] = 100
    return logits_BSV


def test_greedy_takes_the_likeliest_inside_the_vocabulary() -> None:
    assert generate(counting, [7], num_tokens=5, context_len=4, vocab_size=10, temperature=0) == [8, 9, 0, 1, 2]


def test_it_ends_before_the_stop_id() -> None:
    assert generate(counting, [7], num_tokens=5, context_len=4, vocab_size=10, temperature=0, stop_id=0) == [8, 9]


def test_it_looks_back_at_most_the_context() -> None:
    seen: list[list[int]] = []

    def recording(tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        seen.append(tokens_BS[0].tolist())
        assert positions_BS.tolist() == [list(range(tokens_BS.shape[1]))]
        assert not doc_ids_BS.any()
        return counting(tokens_BS, positions_BS, doc_ids_BS)

    generate(recording, [1, 2], num_tokens=3, context_len=3, vocab_size=10, temperature=0)
    assert seen == [[1, 2], [1, 2, 3], [2, 3, 4]]


def test_a_draw_is_a_function_of_the_seed(small: ModelSection, make_model: MakeModel) -> None:
    model = make_model(small)

    def sample(seed: int) -> list[int]:
        return generate(model, [1], num_tokens=20, context_len=8, vocab_size=100, seed=seed)

    first = sample(0)
    torch.rand(3)
    assert sample(0) == first
    assert sample(1) != first
    assert len(first) == 20
    assert max(first) < 100


def test_a_low_temperature_is_nearly_greedy_and_a_high_one_is_not(small: ModelSection, make_model: MakeModel) -> None:
    model = make_model(small)
    greedy, cold, hot = (
        generate(model, [1], num_tokens=12, context_len=8, vocab_size=100, temperature=temperature) for temperature in (0, 1e-3, 100.0)
    )
    assert greedy == cold
    assert greedy != hot


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one id"):
        generate(counting, [], num_tokens=1, context_len=4, vocab_size=10)
