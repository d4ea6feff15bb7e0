"""A decoder-only transformer as one config section describes it: RMSNorm before each part, RoPE, grouped queries, SwiGLU.

Dim letters: B samples, S positions, D d_model, F width of the feed-forward, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from surefoot.core.sections import ModelSection
from surefoot.model.attention import Attention, document_mask
from surefoot.model.rope import rope_table
from surefoot.model.sizes import ModelSizes, resolve_sizes


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x). One product for w1 and w3 was measured: no faster on CPU."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.d_model, sizes.d_ff, bias=False)
        self.w2 = nn.Linear(sizes.d_ff, sizes.d_model, bias=False)
        self.w3 = nn.Linear(sizes.d_model, sizes.d_ff, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        out_BSD: torch.Tensor = self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))
        return out_BSD


class Block(nn.Module):
    """Attention, then feed-forward, each behind its norm and added to the residual stream."""

    def __init__(self, section: ModelSection, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.d_model, eps=section.norm_eps)
        self.attention = Attention(section, sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.d_model, eps=section.norm_eps)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x_BSD: torch.Tensor, *, rope: tuple[torch.Tensor, torch.Tensor], mask_B1ST: torch.Tensor) -> torch.Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope=rope, mask_B1ST=mask_B1ST)
        out_BSD: torch.Tensor = x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))
        return out_BSD


class Transformer(nn.Module):
    """tokens_BS, positions_BS, doc_ids_BS -> logits_BSV. It has no buffers and draws no random numbers.

    Attention never crosses `doc_ids_BS`. With tied embeddings there is no `head`: its matrix is `embed.weight`, counted and saved once.
    """

    def __init__(self, section: ModelSection, vocab_size: int) -> None:
        super().__init__()
        self.section = section
        self.sizes = sizes = resolve_sizes(section, vocab_size)
        self.embed = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.blocks = nn.ModuleList(Block(section, sizes) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.d_model, eps=section.norm_eps)
        self.head = None if sizes.tie_embeddings else nn.Linear(sizes.d_model, sizes.vocab_size, bias=False)

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        rope = rope_table(positions_BS, head_dim=self.sizes.head_dim, base=self.section.rope_base)
        mask_B1ST = document_mask(doc_ids_BS, window=self.sizes.window)
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, rope=rope, mask_B1ST=mask_B1ST)
        x_BSD = self.norm(x_BSD)
        logits_BSV: torch.Tensor = F.linear(x_BSD, self.embed.weight) if self.head is None else self.head(x_BSD)
        if cap := self.section.logit_soft_cap:
            logits_BSV = cap * torch.tanh(logits_BSV / cap)
        return logits_BSV

    def shard_units(self) -> dict[str, nn.Module]:
        """What is gathered together under full sharding, in the order of the forward; the rest belongs to the root.

        A tied embedding stays with the root: it is used at both ends, and the root is gathered throughout.
        """
        blocks: dict[str, nn.Module] = {f"blocks.{index}": block for index, block in enumerate(self.blocks)}
        if self.head is None:
            return blocks
        return {"embed": self.embed, **blocks, "head": self.head}
