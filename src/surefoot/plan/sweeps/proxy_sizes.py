"""Smaller models of one family: the same vocabulary, width of heads, groups of queries and shape, another width and depth. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from surefoot.core.layouts import FF_MULTIPLE
from surefoot.core.model_sizes import ModelSizes, resolve_sizes
from surefoot.core.sections import ModelSection

Count = Callable[[ModelSizes], float]

SHAPE_WEIGHT = 0.25
"""How much a factor in width over depth weighs against the same factor in size. Loss hardly depends on the former (Kaplan et al., arXiv
2001.08361, figure 5: 3% over a factor of 40), and whole layers leave no finer choice in small models."""

MOST_WIDTHS = 4096


def proxy(base: ModelSection, vocab_size: int, *, n: float, count: Count) -> ModelSection:
    """The member of `base`'s family whose `count` comes nearest to `n`, with the vocabulary written down."""
    return min(_family(base, vocab_size, n=n, count=count), key=lambda one: _distance(one, base, vocab_size, n=n, count=count))


def at_width(base: ModelSection, vocab_size: int, *, num_heads: int) -> ModelSection:
    """`base` with that many heads of the same width, as deep as it was."""
    head_dim = base.d_model // base.num_heads
    return replace(
        base,
        preset="",
        vocab_size=resolve_sizes(base, vocab_size).vocab_size,
        d_model=num_heads * head_dim,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(base, num_heads),
        d_ff=_feed_forward(base, num_heads),
    )


def _family(base: ModelSection, vocab_size: int, *, n: float, count: Count) -> Iterator[ModelSection]:
    """One of each width, as deep as comes nearest to `n`, up to the first width whose single layer is too large."""
    for num_heads in range(1, MOST_WIDTHS):
        wide = at_width(base, vocab_size, num_heads=num_heads)
        one, two = (count(resolve_sizes(replace(wide, num_layers=layers), vocab_size)) for layers in (1, 2))
        yield replace(wide, num_layers=max(1, round(1 + (n - one) / (two - one))))
        if one > 2 * n:
            return


def _distance(one: ModelSection, base: ModelSection, vocab_size: int, *, n: float, count: Count) -> float:
    size = abs(math.log(count(resolve_sizes(one, vocab_size)) / n))
    shape = abs(math.log(one.d_model / one.num_layers / (base.d_model / base.num_layers)))
    return size + SHAPE_WEIGHT * shape


def _kv_heads(base: ModelSection, num_heads: int) -> int:
    """As many queries to a key head as in `base`, or the next smaller group that comes out even."""
    if not base.num_kv_heads:
        return 0
    group = base.num_heads // base.num_kv_heads
    return num_heads // next(size for size in range(group, 0, -1) if num_heads % size == 0)


def _feed_forward(base: ModelSection, num_heads: int) -> int:
    """0 stays 0: 8/3 of the width. A width that was given grows in proportion."""
    return max(1, round(base.d_ff * num_heads / base.num_heads / FF_MULTIPLE)) * FF_MULTIPLE if base.d_ff else 0
