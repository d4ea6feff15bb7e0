"""From a number of parameters to a decoder that has them: width, depth, heads, feed-forward, experts. Pure.

Loss hardly depends on the shape (Kaplan et al., arXiv 2001.08361, figure 5), so what decides is the machine: widths that fill the matrix
units, heads and columns that eight devices can share. The proportions are those of published models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.core.layouts import VOCAB_MULTIPLE
from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.sizing.laws import Counted, counted

TOLERANCE = 0.03
"""Of the number that is asked for. Losses move by a hundredth of that."""

LARGE = 1e9
"""From here on a model is cut over devices: 8 key heads, all sizes divisible by 8, head and embedding apart."""

WIDE_HEADS_FROM = 3072
"""Heads of 128 from this width on, of 64 below it, as in Llama 3.2 3B and 1B."""

GROUPED_FF_RATIO = 3.5
"""d_ff over d_model of Llama 3, which gives to the feed-forward what grouped queries take from the attention."""

FF_RATIO = 8.0 / 3.0
"""SwiGLU at the parameters of a 4x MLP (Shazeer, arXiv 2002.05202)."""

NUM_KV_HEADS = 8
CUT = 8
MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """`n` is what the sizes come to, counted as it was asked for."""

    sizes: ModelSizes
    asked: float
    n: float
    counts: Counted

    @property
    def error(self) -> float:
        return self.n / self.asked - 1.0

    @property
    def why(self) -> str:
        """In words, for the reasons of a plan."""
        sizes = self.sizes
        kind = f"{sizes.num_experts} experts, {sizes.experts_per_token} of them for each token" if sizes.num_experts else "dense"
        wide, feed_forward = sizes.d_model / sizes.num_layers, sizes.d_ff / sizes.d_model
        proportion = f"{wide:.0f} wide for each layer, feed-forward {feed_forward:.2f} times the width"
        return f"{self.n:.4g} parameters ({self.counts}), {self.error:+.1%} of what was asked; {proportion}, {kind}"


@dataclass(frozen=True, slots=True)
class Experts:
    """Of each layer; `total` is the parameters of all of them and everything else, where it decides how many there are."""

    per_token: int
    num: int = 0
    num_shared: int = 0
    total: float | None = None


@lru_cache(maxsize=256)
def shape_for(
    n: float, *, vocab_size: int, counts: Counted = "all", experts: Experts | None = None, seq_len: int = 0, tie: bool | None = None
) -> Shape:
    """A decoder of `n` parameters as a law `counts` them. `tie` None ties embedding and head below 1e9.

    With `experts` n is of the active ones ("active" or "flops/6") or of all. Raises ConfigError for what is no size, PlanInfeasible where
    the vocabulary alone is larger.
    """
    _check(n, vocab_size, experts)
    vocab_size = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    tied = n < LARGE if tie is None else tie
    found = min(
        (
            (_score(sizes, n, counts, seq_len, experts), sizes)
            for start in _frames(n, vocab_size=vocab_size, tied=tied)
            if (sizes := _filled(start, n, counts, seq_len, experts)) is not None
        ),
        key=lambda candidate: candidate[0],
        default=None,
    )
    if found is None:
        raise _none_fits(n, vocab_size, counts, experts)
    return Shape(found[1], n, counted(found[1], counts, seq_len=seq_len), counts)


def width_per_layer(n: float) -> float:
    """d_model over num_layers of published models: 64 in GPT-2 124M, 128 in Llama 3 8B and beyond, and on that line in between."""
    return float(min(128.0, 64.0 * (n / 1.24e8) ** (1.0 / 6.0)))


def _check(n: float, vocab_size: int, experts: Experts | None) -> None:
    if not 0 < n < math.inf:
        raise ConfigError(f"{n:g} parameters", where="--params", hint="give a number above 0", got=n)
    if vocab_size < 1:
        raise ConfigError(f"a vocabulary of {vocab_size}", where="--vocab-size", hint="give a number above 0", got=vocab_size)
    if experts and not (experts.per_token >= 1 and (experts.per_token <= experts.num or experts.total)):
        what = f"{experts.per_token} of {experts.num} experts for each token"
        raise ConfigError(what, where="--experts", hint="give more experts than each token passes through", got=experts.per_token)


def _frames(n: float, *, vocab_size: int, tied: bool) -> Iterator[ModelSizes]:
    """Widths and depths worth a look, without a feed-forward yet."""
    wanted = width_per_layer(n)
    likely = (n * wanted / 12.0) ** (1.0 / 3.0)  # 12 d^2 in a layer
    for d_model in _widths(n, likely):
        head_dim = _head_dim(d_model)
        num_heads = d_model // head_dim
        grouped = n >= LARGE and num_heads % NUM_KV_HEADS == 0
        around = d_model / wanted
        step = 2 if around > 40.0 else 1
        for num_layers in range(max(step, int(around / 2.0) // step * step), math.ceil(around * 1.8) + 1, step):
            yield ModelSizes(
                vocab_size=vocab_size,
                num_layers=num_layers,
                d_model=d_model,
                num_heads=num_heads,
                num_kv_heads=NUM_KV_HEADS if grouped else num_heads,
                head_dim=head_dim,
                d_ff=0,
                window=0,
                tie_embeddings=tied,
                qk_norm=False,
            )


def _widths(n: float, likely: float) -> list[int]:
    """Multiples of what heads and devices ask for, from far below the likely one: a large vocabulary makes models narrow."""
    if n >= LARGE:
        steps = range(CUT * 64, int(1.6 * likely) + CUT * 128, CUT * 64)
        return [width for width in steps if width >= likely / 2.0 and width % (CUT * _head_dim(width)) == 0]
    steps = range(16, int(2.0 * likely) + 129, 16)
    return [width for width in steps if width >= likely / 8.0 and width % _width_step(width) == 0]


def _width_step(d_model: int) -> int:
    """Small models too: an even number of heads, so that two devices can share them."""
    if d_model > 512:
        return 128
    return 64 if d_model >= 128 else 16


def _head_dim(d_model: int) -> int:
    if d_model >= WIDE_HEADS_FROM:
        return 128
    if d_model >= 512:
        return 64
    return 32 if d_model >= 128 else 16


def _ff_step(n: float, d_model: int, *, is_expert: bool) -> int:
    """Columns come in multiples of this: whole tiles of the matrix units, on each of eight devices where the model is large."""
    if n >= LARGE:
        return 128 if is_expert else 256
    return 64 if d_model >= 512 else 16


def _filled(frame: ModelSizes, n: float, counts: Counted, seq_len: int, experts: Experts | None) -> ModelSizes | None:
    """The frame with the feed-forward that takes it to `n`; None where that is out of all proportion or misses by too much."""
    if experts:
        num = experts.num or experts.per_token
        frame = replace(frame, num_experts=num, experts_per_token=experts.per_token, num_shared_experts=experts.num_shared)
    step = _ff_step(n, frame.d_model, is_expert=experts is not None)
    empty, one = (counted(replace(frame, d_ff=width), counts, seq_len=seq_len) for width in (0, step))
    num_steps = round((n - empty) / (one - empty))
    if num_steps < 1:
        return None
    sizes = replace(frame, d_ff=num_steps * step)
    if experts and experts.total:
        sizes = _with_total(sizes, experts.total)
        if abs(sizes.num_parameters / experts.total - 1.0) > TOLERANCE or sizes.num_experts > MAX_EXPERTS:
            return None
    ratio = _ff_per_token(sizes) / _wanted_ff(sizes)
    near = abs(counted(sizes, counts, seq_len=seq_len) / n - 1.0) <= TOLERANCE
    return sizes if near and 0.25 <= ratio <= 3.0 else None


def _with_total(sizes: ModelSizes, total: float) -> ModelSizes:
    """As many experts as make `total`: a multiple of eight where there are more, so that devices share them evenly."""
    each = sizes.num_layers * (sizes.expert_matrices + sizes.d_model)
    num = (total - sizes.num_active_parameters) / each + sizes.experts_per_token
    step = CUT if num > 2 * CUT else 1
    return replace(sizes, num_experts=max(sizes.experts_per_token, round(num / step) * step))


def _ff_per_token(sizes: ModelSizes) -> float:
    return sizes.d_ff * max(1, sizes.experts_per_token + sizes.num_shared_experts) / sizes.d_model


def _wanted_ff(sizes: ModelSizes) -> float:
    return GROUPED_FF_RATIO if sizes.num_kv_heads < sizes.num_heads else FF_RATIO


def _score(sizes: ModelSizes, n: float, counts: Counted, seq_len: int, experts: Experts | None) -> float:
    """How far from the proportions of published models, all as squared logs; the number itself counts most."""
    aspect = math.log(sizes.d_model / sizes.num_layers / width_per_layer(n))
    feed_forward = math.log(_ff_per_token(sizes) / _wanted_ff(sizes))
    miss = math.log(counted(sizes, counts, seq_len=seq_len) / n)
    total = math.log(sizes.num_parameters / experts.total) if experts and experts.total else 0.0
    # A depth that halves often can be dealt to pipeline stages; worth about 7% of proportion each time.
    odd = 0.005 * (3 - min(3, (sizes.num_layers & -sizes.num_layers).bit_length() - 1)) if n >= LARGE else 0.0
    return aspect**2 + 2.0 * feed_forward**2 + 100.0 * (miss**2 + total**2) + odd


def _none_fits(n: float, vocab_size: int, counts: Counted, experts: Experts | None) -> PlanInfeasible:
    if experts:
        what = f"no decoder with {experts.per_token} experts for each token has {n:.3g} parameters ({counts})"
        what += f" and {experts.total:.3g} in all" if experts.total else ""
        return PlanInfeasible(what, where="shape", hint="ask for fewer or more experts, or another total", got=n)
    least = 64 * vocab_size
    return PlanInfeasible(
        f"no decoder with a vocabulary of {vocab_size} has {n:.3g} parameters ({counts}) in any proportion",
        where="shape",
        hint=f"a vocabulary of {vocab_size} takes {least:.3g} at a width of 64 alone: use a smaller one, or more parameters",
        got=n,
        limit=least,
    )


def _public(vocab_size: int, layers: int, width: int, heads: int, kv: int, ff: int, *, tied: bool = False, experts: int = 0) -> ModelSizes:
    return ModelSizes(
        vocab_size=vocab_size,
        num_layers=layers,
        d_model=width,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=width // heads,
        d_ff=ff,
        window=0,
        tie_embeddings=tied,
        qk_norm=False,
        num_experts=experts,
        experts_per_token=2 if experts else 0,
    )


PUBLIC_SHAPES: Mapping[str, ModelSizes] = {
    "llama-3.2-1b": _public(128256, 16, 2048, 32, 8, 8192, tied=True),
    "llama-2-7b": _public(32000, 32, 4096, 32, 32, 11008),
    "llama-3-8b": _public(128256, 32, 4096, 32, 8, 14336),
    "mixtral-8x7b": _public(32000, 32, 4096, 32, 8, 14336, experts=8),
    "llama-3-70b": _public(128256, 80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _public(128256, 126, 16384, 128, 8, 53248),
}
"""From the configs that were published with the weights."""
