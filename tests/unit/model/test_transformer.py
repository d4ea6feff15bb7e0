"""The transformer against an independent one written out with loops, and its options one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model, shard_units
from surefoot.model.transformer import Transformer
from surefoot.tensors.batch import Batch

MakeModel = Callable[[ModelSection], Transformer]
MakeBatch = Callable[..., Batch]
Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x_E: torch.Tensor, *, position: int, base: float) -> torch.Tensor:
    """RoPE as a product of complex numbers."""
    half = len(x_E) // 2
    pairs = torch.complex(x_E[:half], x_E[half:])
    angles = torch.tensor([position * base ** (-2 * index / len(x_E)) for index in range(half)], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones(half, dtype=torch.float64), angles)
    return torch.cat([turned.real, turned.imag])


def cap(x: torch.Tensor, limit: float) -> torch.Tensor:
    return limit * torch.tanh(x / limit) if limit else x


def reference_logits(
    section: ModelSection, weights: Weights, *, tokens: list[int], positions: list[int], doc_ids: list[int]
) -> torch.Tensor:
    """One sequence in float64, one query and one head at a time."""
    eps = section.norm_eps
    heads, kv_heads = section.num_heads, section.num_kv_heads or section.num_heads
    dim = section.d_model // heads
    x_SD = weights["embed.weight"][tokens]
    for layer in range(section.num_layers):
        w = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items() if name.startswith(f"blocks.{layer}.")}
        h_SD = norm(x_SD, w["attention_norm.weight"], eps=eps)
        q, k, v = (
            (h_SD @ w[f"attention.{name}.weight"].T).reshape(-1, count, dim)
            for name, count in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
        )
        if section.qk_norm:
            q, k = norm(q, w["attention.q_norm.weight"], eps=eps), norm(k, w["attention.k_norm.weight"], eps=eps)
        rows = []
        for s in range(len(tokens)):
            out = []
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                seen = [t for t in range(s + 1) if doc_ids[t] == doc_ids[s] and (not section.window or s - t < section.window)]
                query = turn(q[s, head], position=positions[s], base=section.rope_base)
                scores = torch.stack([query @ turn(k[t, kv_head], position=positions[t], base=section.rope_base) for t in seen])
                shares = cap(scores / math.sqrt(dim), section.attention_soft_cap).softmax(0)
                out.append(sum(share * v[t, kv_head] for share, t in zip(shares, seen, strict=True)))
            rows.append(torch.cat(out))
        x_SD = x_SD + torch.stack(rows) @ w["attention.wo.weight"].T
        h_SD = norm(x_SD, w["feed_forward_norm.weight"], eps=eps)
        gate = h_SD @ w["feed_forward.w1.weight"].T
        x_SD = x_SD + (gate / (1 + (-gate).exp()) * (h_SD @ w["feed_forward.w3.weight"].T)) @ w["feed_forward.w2.weight"].T
    head_VD = weights["embed.weight" if section.tie_embeddings else "head.weight"]
    return cap(norm(x_SD, weights["norm.weight"], eps=eps) @ head_VD.T, section.logit_soft_cap)


def test_logits_are_those_of_the_reference(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(kind), make_batch()
    logits_BSV = model(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    assert logits_BSV.shape == (2, 12, 128)
    weights = {name: value.double() for name, value in model.state_dict().items()}
    for row in range(2):
        wanted = reference_logits(
            kind,
            weights,
            tokens=batch.tokens_BS[row].tolist(),
            positions=batch.positions_BS[row].tolist(),
            doc_ids=batch.doc_ids_BS[row].tolist(),
        )
        # float32 against float64, on logits of about 10
        torch.testing.assert_close(logits_BSV[row].double(), wanted, atol=2e-4, rtol=0)


def test_positions_count_only_relative_to_each_other(small: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(small), make_batch()
    here = model(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    there = model(batch.tokens_BS, batch.positions_BS + 100, batch.doc_ids_BS)
    stretched = model(batch.tokens_BS, 2 * batch.positions_BS, batch.doc_ids_BS)
    torch.testing.assert_close(here, there, atol=1e-3, rtol=0)
    assert (here - stretched).abs().max() > 0.1


def test_soft_caps_bound_the_logits(small: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    batch = make_batch()
    free = make_model(small)(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    capped = make_model(replace(small, logit_soft_cap=2.0))(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    assert free.abs().max() > 2.0
    assert capped.abs().max() <= 2.0


def test_a_very_wide_attention_cap_is_the_fused_kernel(small: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    batch = make_batch()
    fused = make_model(small)(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    capped = make_model(replace(small, attention_soft_cap=1e5))(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    torch.testing.assert_close(fused, capped, atol=1e-3, rtol=0)


def test_names_are_the_usual_ones(small: ModelSection) -> None:
    block = [
        "attention_norm.weight",
        *(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")),
        "feed_forward_norm.weight",
        *(f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")),
    ]
    names = ["embed.weight", *(f"blocks.{layer}.{name}" for layer in range(2) for name in block), "norm.weight"]
    assert list(build_model(small, 100, seed=0).state_dict()) == names
    assert list(build_model(replace(small, tie_embeddings=False), 100, seed=0).state_dict()) == [*names, "head.weight"]
    assert not list(build_model(small, 100, seed=0).buffers())


@pytest.mark.parametrize("tied", [True, False])
def test_it_says_how_it_may_be_cut(small: ModelSection, tied: bool) -> None:
    model = build_model(replace(small, tie_embeddings=tied), 100, seed=0)
    units = shard_units(model)
    assert list(units) == (["blocks.0", "blocks.1"] if tied else ["embed", "blocks.0", "blocks.1", "head"])
    assert all(model.get_submodule(name) is unit for name, unit in units.items())


def test_the_same_call_gives_the_same_bits(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    batch = make_batch()
    first, second = (make_model(kind)(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS) for _ in range(2))
    assert torch.equal(first, second)
