"""The sizes of a model of which a table tells only some: its parameters, or its width and depth. For predicting time, not for training."""

from __future__ import annotations

import re

from surefoot.core.errors import DataError
from surefoot.core.model_sizes import ModelSizes

USUAL_VOCAB = 50_304
"""GPT-2's, rounded up: what tables of before 2024 have that do not say."""

TIES_BELOW = 4e9
"""Parameters. Embedding and head are one matrix in Llama 3.2, Qwen 3 and nanotron's benchmarks below this size, two above."""

WIDTH_PER_LAYER = 128
"""d_model over layers: 4096 and 32 at 7B in GPT-3, Llama and MPT alike."""

PARAMETERS_PER_LAYER = 12
"""In squares of d_model: 4 for attention, 8 for the feed-forward, be it two matrices of 4 or three of 8/3."""

HEAD_DIM = 128
MAX_WIDTH = 65_536


def guess_sizes(
    *,
    params: float | None,
    d_model: int | None,
    num_layers: int | None,
    num_heads: int | None,
    num_kv_heads: int | None,
    vocab_size: int | None,
    notes: str,
    where: str,
) -> ModelSizes:
    """The feed-forward is as wide as the parameters ask for. Raises DataError where there is too little to go by."""
    vocab_size = vocab_size or _vocab_in(notes) or USUAL_VOCAB
    if params is None and (d_model is None or num_layers is None):
        raise DataError("neither params nor hidden and layers are there", where=where, hint="fill in params, or both")
    if d_model is None or num_layers is None:
        assert params is not None
        d_model, num_layers = _usual_shape(params, vocab_size, d_model=d_model, num_layers=num_layers)
    heads = num_heads or max(1, d_model // HEAD_DIM)
    head_dim = max(1, d_model // heads)
    attention = d_model * head_dim * (2 * heads + 2 * (num_kv_heads or heads))
    if params is None:
        params = num_layers * PARAMETERS_PER_LAYER * d_model**2 + 2.0 * vocab_size * d_model
    ties = params < TIES_BELOW
    body = params - (1 if ties else 2) * vocab_size * d_model
    d_ff = round((body / num_layers - attention) / (3 * d_model))
    if d_ff <= 0:
        what = f"{params:.4g} parameters are fewer than attention, embedding and head of {num_layers} layers of {d_model} have"
        raise DataError(what, where=where, hint="check params, hidden and layers; a column `vocab` is read, 50304 is taken without")
    return ModelSizes(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=heads,
        num_kv_heads=num_kv_heads or heads,
        head_dim=head_dim,
        d_ff=d_ff,
        window=0,
        tie_embeddings=ties,
        qk_norm=False,
    )


def _vocab_in(notes: str) -> int | None:
    """Tables without the column often say "vocab 131072" in words."""
    found = re.search(r"vocab\D{0,6}(\d{4,7})", notes)
    return int(found.group(1)) if found else None


def _usual_shape(params: float, vocab_size: int, *, d_model: int | None, num_layers: int | None) -> tuple[int, int]:
    """Of usual proportions, where width or depth is not told: the one with the nearest number of parameters."""
    matrices = (1 if params < TIES_BELOW else 2) * vocab_size
    if d_model is not None:
        return d_model, max(1, round((params - matrices * d_model) / (PARAMETERS_PER_LAYER * d_model**2)))
    shapes = [(width, num_layers or max(1, round(width / WIDTH_PER_LAYER))) for width in range(HEAD_DIM, MAX_WIDTH + 1, HEAD_DIM)]
    return min(shapes, key=lambda shape: abs(PARAMETERS_PER_LAYER * shape[0] ** 2 * shape[1] + matrices * shape[0] - params))
