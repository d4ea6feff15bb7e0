"""The sizes that a `[model]` section comes to, and what they cost: parameters and FLOPs, counted exactly, without torch.

A multiply-add is 2 FLOPs. Only matrix products are counted, as everywhere in the literature; norms, softmax and RoPE are a few per cent at
small widths and vanish at large ones. Training cannot build experts yet, planning can count them: a token passes through
`experts_per_token` of a layer's `num_experts` and through its `num_shared_experts`, each a SwiGLU of width `d_ff`, chosen by a router.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.core.errors import ConfigError
from surefoot.core.layouts import VOCAB_MULTIPLE, feed_forward_width
from surefoot.core.sections import ModelSection


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Every size resolved. `vocab_size` is the number of rows of the embedding; ids past the tokenizer's own are never seen."""

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    window: int
    tie_embeddings: bool
    qk_norm: bool
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0

    @property
    def num_embedding_parameters(self) -> int:
        return self.vocab_size * self.d_model

    @property
    def num_head_parameters(self) -> int:
        """Beyond the embedding: 0 when tied."""
        return 0 if self.tie_embeddings else self.vocab_size * self.d_model

    @property
    def num_body_parameters(self) -> int:
        """Everything but embedding and head: the N of Kaplan's law. Hoffmann's and Epoch's N is `num_parameters`."""
        norms = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        return self.num_layers * (self.attention_matrices + self._feed_forwards(self.num_experts) + norms) + self.d_model

    @property
    def num_parameters(self) -> int:
        return self.num_body_parameters + self.num_embedding_parameters + self.num_head_parameters

    @property
    def num_active_parameters(self) -> int:
        """Those that one token passes through: the N of laws for mixtures of experts. All of them in a dense model."""
        return self.num_parameters - self.num_layers * (self._feed_forwards(self.num_experts) - self._feed_forwards(self.experts_per_token))

    @property
    def attention_matrices(self) -> int:
        """Elements of one layer's query, key, value and output matrices."""
        return self.d_model * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_matrices(self) -> int:
        """Elements of one SwiGLU: gate, up and down."""
        return 3 * self.d_model * self.d_ff

    def _feed_forwards(self, num_routed: int) -> int:
        """Elements of a layer's feed-forward where `num_routed` experts are counted; the router scores all there are."""
        if not self.num_experts:
            return self.expert_matrices
        return (num_routed + self.num_shared_experts) * self.expert_matrices + self.num_experts * self.d_model

    def flops_per_sequence(self, seq_len: int) -> int:
        """Forward and backward of one sequence. Attention is causal and windowed; the backward of a product is two of its size.

        Document boundaries inside the sequence are not known here: they save work only in kernels that skip masked blocks.
        """
        head = self.vocab_size * self.d_model
        products = seq_len * (self.num_layers * (self.attention_matrices + self._feed_forwards(self.experts_per_token)) + head)
        pairs = attended_pairs(seq_len, window=self.window)
        scores_and_values = 2 * self.num_layers * self.num_heads * self.head_dim * pairs
        return 3 * 2 * (products + scores_and_values)

    def flops_per_token(self, seq_len: int) -> float:
        return self.flops_per_sequence(seq_len) / seq_len


def attended_pairs(seq_len: int, *, window: int) -> int:
    """How many (query, key) pairs a causal mask with `window` keeps; the query itself is one of its window. 0 is no limit."""
    reach = min(window, seq_len) if window else seq_len
    return reach * (reach + 1) // 2 + (seq_len - reach) * reach


def resolve_sizes(section: ModelSection, vocab_size: int) -> ModelSizes:
    """The sizes of `section` for a tokenizer of `vocab_size`. Raises ConfigError where they do not fit together."""
    _check(section, vocab_size)
    return ModelSizes(
        vocab_size=section.vocab_size or _round_up(vocab_size, VOCAB_MULTIPLE),
        num_layers=section.num_layers,
        d_model=section.d_model,
        num_heads=section.num_heads,
        num_kv_heads=section.num_kv_heads or section.num_heads,
        head_dim=section.d_model // section.num_heads,
        d_ff=feed_forward_width(section),
        window=section.window,
        tie_embeddings=section.tie_embeddings,
        qk_norm=section.qk_norm,
    )


def _check(section: ModelSection, vocab_size: int) -> None:
    d_model, num_heads, num_kv_heads = section.d_model, section.num_heads, section.num_kv_heads
    if d_model % num_heads:
        raise ConfigError(
            f"d_model {d_model} is not a multiple of num_heads {num_heads}",
            where="[model] num_heads",
            hint="every head has d_model / num_heads dimensions",
            got=num_heads,
        )
    if (d_model // num_heads) % 2:
        raise ConfigError(
            f"heads of {d_model // num_heads} dimensions cannot be rotated in pairs",
            where="[model] num_heads",
            hint="choose num_heads so that d_model / num_heads is even",
            got=num_heads,
        )
    if num_kv_heads and num_heads % num_kv_heads:
        raise ConfigError(
            f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}",
            where="[model] num_kv_heads",
            hint="each key head serves the same number of query heads",
            got=num_kv_heads,
        )
    if section.vocab_size and section.vocab_size < vocab_size:
        raise ConfigError(
            f"vocab_size {section.vocab_size} is smaller than the tokenizer's {vocab_size}",
            where="[model] vocab_size",
            hint="leave it at 0 to take the tokenizer's",
            got=section.vocab_size,
            limit=vocab_size,
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
