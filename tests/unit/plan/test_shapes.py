"""Decoders of a wished number of parameters: near it, cut by eight where large, in the proportions of published models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.plan.sizing.laws import Counted, counted
from surefoot.plan.sizing.shapes import LARGE, PUBLIC_SHAPES, TOLERANCE, Experts, shape_for, width_per_layer


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.2-1b", 1_235_814_400, 1_235_814_400),
        ("llama-2-7b", 6_738_415_616, 6_738_415_616),
        ("llama-3-8b", 8_030_261_248, 8_030_261_248),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("llama-3-70b", 70_553_706_496, 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800, 405_853_388_800),
    ],
)
def test_published_models_count_what_they_should(name: str, total: int, active: int) -> None:
    assert PUBLIC_SHAPES[name].num_parameters == total
    assert PUBLIC_SHAPES[name].num_active_parameters == active


@settings(max_examples=20, deadline=None)
@given(st.floats(2e6, 1e12), st.sampled_from([256, 8192, 32000, 128256]), st.sampled_from(["all", "body", "without embedding"]))
def test_any_size_is_met(n: float, vocab_size: int, counts: Counted) -> None:
    if 200 * vocab_size > n:
        return
    shape = shape_for(n, vocab_size=vocab_size, counts=counts)
    sizes = shape.sizes
    assert abs(shape.error) <= TOLERANCE
    assert shape.n == counted(sizes, counts)
    assert sizes.num_heads * sizes.head_dim == sizes.d_model
    assert sizes.num_heads % sizes.num_kv_heads == 0
    assert 0.3 < sizes.d_model / sizes.num_layers / width_per_layer(n) < 3.0
    assert sizes.d_model <= 512 or sizes.d_model % 128 == 0
    if n >= LARGE:
        for size in (sizes.num_heads, sizes.num_kv_heads, sizes.d_ff, sizes.d_model, sizes.vocab_size):
            assert size % 8 == 0
        assert not sizes.tie_embeddings
    else:
        assert sizes.tie_embeddings


def test_eight_billion_are_llama_3_8b() -> None:
    assert shape_for(8e9, vocab_size=128256).sizes == PUBLIC_SHAPES["llama-3-8b"]


@pytest.mark.parametrize("n", [1e6, 1.5e6, 3e6])
def test_tiny_ones(n: float) -> None:
    for vocab_size in (256, 8192):
        shape = shape_for(n, vocab_size=vocab_size)
        assert abs(shape.error) <= TOLERANCE
        assert shape.sizes.num_layers >= 2


def test_a_vocabulary_that_is_larger_than_the_model() -> None:
    with pytest.raises(PlanInfeasible, match="vocabulary of 128256") as caught:
        shape_for(1e6, vocab_size=128256)
    assert "8.21e+06" in caught.value.hint


def test_a_vocabulary_is_padded() -> None:
    assert shape_for(1e8, vocab_size=50257).sizes.vocab_size == 50304


@pytest.mark.parametrize(
    ("active", "total", "per_token", "shared"),
    [(3e9, 30e9, 8, 0), (37e9, 671e9, 8, 1), (12.9e9, 46.7e9, 2, 0), (5e7, 2e8, 2, 0), (32e9, 1e12, 8, 1)],
)
def test_experts_for_an_active_and_a_total_number(active: float, total: float, per_token: int, shared: int) -> None:
    experts = Experts(per_token, num_shared=shared, total=total)
    shape = shape_for(active, vocab_size=32000, counts="active", experts=experts)
    assert abs(shape.sizes.num_active_parameters / active - 1) <= TOLERANCE
    assert abs(shape.sizes.num_parameters / total - 1) <= TOLERANCE
    assert shape.sizes.experts_per_token == per_token < shape.sizes.num_experts
    assert "experts" in shape.why


def test_a_given_number_of_experts() -> None:
    shape = shape_for(3e9, vocab_size=128256, counts="active", experts=Experts(8, num=128))
    assert (shape.sizes.num_experts, shape.sizes.experts_per_token) == (128, 8)
    assert abs(shape.error) <= TOLERANCE
    assert shape.sizes.num_parameters > 8 * shape.sizes.num_active_parameters


def test_what_is_no_shape() -> None:
    with pytest.raises(ConfigError, match="0 parameters"):
        shape_for(0.0, vocab_size=256)
    with pytest.raises(ConfigError, match="a vocabulary of 0"):
        shape_for(1e9, vocab_size=0)
    with pytest.raises(ConfigError, match="8 of 4 experts"):
        shape_for(1e9, vocab_size=256, experts=Experts(8, num=4))
    with pytest.raises(PlanInfeasible, match="experts"):
        shape_for(1e9, vocab_size=32000, counts="active", experts=Experts(1, total=1e14))
