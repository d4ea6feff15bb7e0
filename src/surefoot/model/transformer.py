"""A decoder-only transformer as one config section describes it: RMSNorm before each part, RoPE, grouped queries, SwiGLU.

Dim letters: B samples, S positions, D d_model, F width of the feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from surefoot.core.model_sizes import ModelSizes, resolve_sizes
from surefoot.core.sections import ModelSection
from surefoot.model.attention import Attention, DocumentMask
from surefoot.model.mup import width_factor
from surefoot.model.precision import at_least_float32
from surefoot.model.rope import Rotary
from surefoot.tensors.batch import IGNORED_LABEL
from surefoot.tensors.cut_vocabulary import is_cut, reduce_log_z

_MAX_LOGITS = 1 << 22  # looked at in one piece: 16 MiB in float32, and as much again


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


class Logits(nn.Identity):
    """What the logits come out of, so that they can be watched wherever the head is: a tied one is no module of its own."""

    def log_z(self, logits_BSV: torch.Tensor, *, rows: torch.Tensor) -> torch.Tensor:
        """log_z_N of the positions `rows` of each sample, in pieces that fit. Collective over the ranks that the vocabulary is cut over."""
        # In float32 all of them would take hundreds of megabytes of a large vocabulary. It is cut evenly, so ranks take as many at once.
        at_once = max(1, _MAX_LOGITS // max(1, logits_BSV.shape[0] * logits_BSV.shape[2]))
        return torch.cat([_log_z(logits_BSV, some) for some in torch.split(rows, at_once)])


def _log_z(logits_BSV: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Collective over the ranks that the vocabulary is cut over."""
    if is_cut(logits_BSV):
        assert isinstance(logits_BSV, DTensor)
        some_BSV = DTensor.from_local(logits_BSV.to_local()[:, rows], logits_BSV.device_mesh, logits_BSV.placements)
        log_z_N, _ = reduce_log_z(some_BSV, rows.new_full((some_BSV.shape[0] * len(rows),), IGNORED_LABEL))
        return log_z_N
    return torch.logsumexp(at_least_float32(logits_BSV[:, rows].flatten(0, 1)), dim=-1)


class Transformer(nn.Module):
    """tokens_BS, positions_BS, doc_ids_BS -> logits_BSV. It has no buffers and draws no random numbers.

    Attention never crosses `doc_ids_BS`. With tied embeddings there is no `head`: its matrix is `embed.weight`, counted and saved once.
    """

    def __init__(self, section: ModelSection, vocab_size: int) -> None:
        super().__init__()
        self.section = section
        self.sizes = sizes = resolve_sizes(section, vocab_size)
        self.embed: nn.Embedding | None = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.mask = DocumentMask(window=sizes.window)
        self.rotary = Rotary(head_dim=sizes.head_dim, base=section.rope_base)
        self.blocks: nn.Module = nn.ModuleList(Block(section, sizes) for _ in range(sizes.num_layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(sizes.d_model, eps=section.norm_eps)
        self.head = None if sizes.tie_embeddings else nn.Linear(sizes.d_model, sizes.vocab_size, bias=False)
        self.logits = Logits()

    def part(self, names: Collection[str]) -> Transformer:
        """Local. A view with only the submodules `names`, the same objects under the same names: what one stage of a pipeline runs.

        Without the first block it takes x_BSD in place of tokens; without `norm` it returns x_BSD. A tied matrix is `embed` at both ends.
        """
        with torch.device("meta"):
            view = Transformer(self.section, self.sizes.vocab_size)
        view.mask, view.rotary, view.logits = self.mask, self.rotary, self.logits
        view.embed = self.embed if "embed" in names else None
        view.blocks = nn.ModuleDict({index: block for index, block in self.blocks.named_children() if f"blocks.{index}" in names})
        view.norm = self.norm if "norm" in names else None
        view.head = self.head if "head" in names else None
        return view

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        index_S = torch.arange(doc_ids_BS.shape[1], device=doc_ids_BS.device)
        mask_B1ST = self.mask(doc_ids_BS, index_S, (doc_ids_BS, index_S))
        x_BSD = tokens_BS if self.embed is None or tokens_BS.is_floating_point() else self.embed(tokens_BS)
        rope = self.rotary(positions_BS, dtype=x_BSD.dtype)
        for block in self.blocks.children():
            x_BSD = block(x_BSD, rope=rope, mask_B1ST=mask_B1ST)
        if self.norm is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        if (factor := width_factor(self.section)) != 1.0:
            x_BSD = x_BSD / factor
        logits_BSV: torch.Tensor = self.head(x_BSD) if self.head is not None else F.linear(x_BSD, self._tied().weight)
        if cap := self.section.logit_soft_cap:
            logits_BSV = cap * torch.tanh(logits_BSV / cap)
        logits_BSV = self.logits(logits_BSV)
        return logits_BSV

    def shard_units(self) -> dict[str, nn.Module]:
        """What is gathered together under full sharding, in the order of the forward; the rest belongs to the root.

        A tied embedding stays with the root: it is used at both ends, and the root is gathered throughout.
        """
        blocks: dict[str, nn.Module] = {f"blocks.{index}": block for index, block in self.blocks.named_children()}
        if self.head is None or self.embed is None:
            return blocks
        return {"embed": self.embed, **blocks, "head": self.head}

    def _tied(self) -> nn.Embedding:
        assert self.embed is not None  # where the norm is, its matrix is
        return self.embed
