"""Counts without torch against the module's own, and FLOPs against torch's counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from surefoot.core.errors import ConfigError
from surefoot.core.model_sizes import attended_pairs, resolve_sizes
from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model
from surefoot.model.loss import loss_sum
from surefoot.tensors.batch import Batch

LARGE = ModelSection(num_layers=3, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14336, tie_embeddings=False)


@pytest.mark.parametrize("section", [ModelSection(), LARGE], ids=["default", "large"])
def test_parameters_are_counted_as_the_module_counts_them(section: ModelSection) -> None:
    assert_counts_match(section, vocab_size=8000)


def test_parameters_of_every_kind_are_counted_as_the_module_counts_them(kind: ModelSection) -> None:
    assert_counts_match(kind, vocab_size=100)


def assert_counts_match(section: ModelSection, *, vocab_size: int) -> None:
    sizes = resolve_sizes(section, vocab_size)
    counts = {name: parameter.numel() for name, parameter in build_model(section, vocab_size, seed=0).named_parameters()}
    assert sizes.num_parameters == sum(counts.values())
    assert sizes.num_embedding_parameters == counts.pop("embed.weight")
    assert sizes.num_head_parameters == counts.pop("head.weight", 0)
    assert sizes.num_body_parameters == sum(counts.values())


def test_known_counts() -> None:
    llama_3_8b = replace(LARGE, num_layers=32, rope_base=500_000.0)
    assert resolve_sizes(llama_3_8b, 128_256).num_parameters == 8_030_261_248
    assert resolve_sizes(ModelSection(), 8192).num_parameters == 3_344_064


def test_sizes_left_open_are_filled_in() -> None:
    sizes = resolve_sizes(ModelSection(d_model=192, num_heads=6), 8001)
    assert (sizes.vocab_size, sizes.num_kv_heads, sizes.head_dim, sizes.d_ff) == (8064, 6, 32, 512)
    sizes = resolve_sizes(ModelSection(d_model=256, num_heads=8, num_kv_heads=2, d_ff=100, vocab_size=9000), 8001)
    assert (sizes.vocab_size, sizes.num_kv_heads, sizes.head_dim, sizes.d_ff) == (9000, 2, 32, 100)


@pytest.mark.parametrize(
    ("section", "where"),
    [
        (ModelSection(d_model=100, num_heads=3), "[model] num_heads"),
        (ModelSection(d_model=18, num_heads=6), "[model] num_heads"),
        (ModelSection(d_model=192, num_heads=6, num_kv_heads=4), "[model] num_kv_heads"),
        (ModelSection(vocab_size=99), "[model] vocab_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(section: ModelSection, where: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_sizes(section, 100)
    assert raised.value.where == where
    assert raised.value.hint


@pytest.mark.parametrize("window", [0, 1, 3, 8, 9, 100])
def test_attended_pairs_are_those_of_the_mask(window: int) -> None:
    wanted = sum(1 for query in range(8) for key in range(query + 1) if not window or query - key < window)
    assert attended_pairs(8, window=window) == wanted


def test_flops_are_those_that_torch_counts_less_the_masked_pairs(kind: ModelSection) -> None:
    num_sequences, seq_len = 3, 16
    sizes = resolve_sizes(kind, 100)
    zeros_BS = torch.zeros(num_sequences, seq_len, dtype=torch.int64, device="meta")
    batch = Batch(
        tokens_BS=zeros_BS,
        labels_BS=zeros_BS,
        positions_BS=zeros_BS,
        doc_ids_BS=zeros_BS,
        sample_ids_B=zeros_BS[:, 0],
        num_live_tokens=0,
        atom=0,
    )
    # The eager attention, whose products torch counts one by one, all pairs of them.
    model = build_model(replace(kind, attention_soft_cap=50.0), 100, seed=0)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(loss_sum(model, batch).objective)
    masked_pairs = seq_len**2 - attended_pairs(seq_len, window=kind.window)
    wasted = 3 * 2 * 2 * sizes.num_layers * sizes.num_heads * sizes.head_dim * masked_pairs
    assert num_sequences * (sizes.flops_per_sequence(seq_len) + wasted) == counter.get_total_flops()


def test_flops_per_token_near_six_per_parameter_for_a_large_model() -> None:
    sizes = resolve_sizes(replace(LARGE, num_layers=32), 128_256)
    six_n = 6 * (sizes.num_parameters - sizes.num_embedding_parameters)
    assert 1.0 < sizes.flops_per_token(8192) / six_n < 1.2
    assert sizes.flops_per_token(2) / six_n == pytest.approx(1.0, abs=1e-3)
