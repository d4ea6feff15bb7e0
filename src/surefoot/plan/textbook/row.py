"""One classic rule and what is right: the record that the textbook is made of, and how its numbers are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from surefoot.core.model_sizes import ModelSizes

Verdict = Literal["right", "imprecise", "incomplete", "wrong", "contradiction"]
Basis = Literal["computed", "measured", "computed and measured"]


@dataclass(frozen=True, slots=True)
class Row:
    """`figures` are the numbers of `right`, by name. `basis`: what this code computed, what others measured on public curves, or both."""

    key: str
    claim: str
    right: str
    verdict: Verdict
    why: str
    source: str
    figures: Mapping[str, float]
    basis: Basis = "computed"


@dataclass(frozen=True, slots=True)
class Chapter:
    title: str
    rows: tuple[Row, ...]


LLAMA_7B = ModelSizes(
    vocab_size=32_000,
    num_layers=32,
    d_model=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    d_ff=11_008,
    window=0,
    tie_embeddings=False,
    qk_norm=False,
)
"""Llama 2 7B (arXiv 2307.09288): the 7B of the examples, where a shape is needed."""


def short(value: float) -> str:
    """Three digits: 1.02e24, 40.8B, 816B, 4.76T."""
    for limit, unit in ((1e15, ""), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value:.3g}" if not unit else f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
