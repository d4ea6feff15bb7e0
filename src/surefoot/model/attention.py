"""Causal self-attention inside documents: grouped queries, windows, optional norm on queries and keys, optional soft-cap.

Dim letters: B samples, S query positions, T key positions, D d_model, H query heads, K key heads, E dims of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from surefoot.core.model_sizes import ModelSizes
from surefoot.core.sections import ModelSection
from surefoot.model.mup import attention_scale
from surefoot.model.precision import at_least_float32
from surefoot.model.rope import rotate

_MAX_SCORES = 1 << 23  # elements of one product of queries and keys that is made for a look: 32 MiB

Keys = tuple[torch.Tensor, torch.Tensor]
"""doc_ids_BT and index_T of keys: their documents, and where in the sequence they are. Their order means nothing."""


class DocumentMask(nn.Module):
    """doc_ids_BS and index_S of the queries, and the keys -> bool mask_B1ST, True where query s may see key t.

    That is: not later, the same document, at most `window` - 1 back (0: any). A position always sees itself, so no row is empty. Built once
    per forward and used whatever the batch holds: choosing a kernel by content would choose bits by content. On CPU the mask costs 4 to 6%
    of attention over `is_causal`, 1% of a small step. A module so that context parallel can put all keys in place of the queries' own.
    """

    def __init__(self, *, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, doc_ids_BS: torch.Tensor, index_S: torch.Tensor, keys: Keys) -> torch.Tensor:
        key_doc_ids_BT, key_index_T = keys
        distance_ST = index_S[:, None] - key_index_T[None, :]
        allowed_ST = distance_ST >= 0
        if self.window:
            allowed_ST &= distance_ST < self.window
        same_document_BST = doc_ids_BS[:, :, None] == key_doc_ids_BT[:, None, :]
        return (same_document_BST & allowed_ST)[:, None]


class CoreAttention(nn.Module):
    """q_BHSE, k_BKTE, v_BKTE -> out_BHSE. Its own module so that context parallel can hand it the keys and values of other ranks too."""

    def __init__(self, *, soft_cap: float, num_key_heads: int, scale: float | None = None) -> None:
        super().__init__()
        self.num_key_heads = num_key_heads  # of the whole model: tensor parallel leaves a rank some of them
        self.soft_cap = soft_cap
        self.scale = scale

    def forward(self, q_BHSE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, *, mask_B1ST: torch.Tensor) -> torch.Tensor:
        if self.soft_cap:
            return _capped_attention(q_BHSE, k_BKTE, v_BKTE, mask_B1ST=mask_B1ST, cap=self.soft_cap, scale=self.scale)
        grouped = q_BHSE.shape[1] != k_BKTE.shape[1]
        return F.scaled_dot_product_attention(q_BHSE, k_BKTE, v_BKTE, attn_mask=mask_B1ST, scale=self.scale, enable_gqa=grouped)

    def largest_logits(
        self, q_BHSE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, *, mask_B1ST: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """logit_K: the largest, before a soft-cap, of the query heads that share each key head, at the query positions `rows` alone."""
        largest_BH = largest_logits(q_BHSE[:, :, rows], k_BKTE, mask_B1ST=mask_B1ST[:, :, rows], scale=self.scale)
        return torch.unflatten(largest_BH, 1, (k_BKTE.shape[1], -1)).amax(dim=(0, 2))


class Attention(nn.Module):
    """x_BSD -> x_BSD. How many heads there are is read off the projections: tensor parallel leaves a rank some of them."""

    def __init__(self, section: ModelSection, sizes: ModelSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.wq = nn.Linear(sizes.d_model, sizes.num_heads * sizes.head_dim, bias=False)
        self.wk = nn.Linear(sizes.d_model, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.wv = nn.Linear(sizes.d_model, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.wo = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.d_model, bias=False)
        self.q_norm = nn.RMSNorm(sizes.head_dim, eps=section.norm_eps) if sizes.qk_norm else None
        self.k_norm = nn.RMSNorm(sizes.head_dim, eps=section.norm_eps) if sizes.qk_norm else None
        self.core = CoreAttention(
            soft_cap=section.attention_soft_cap,
            num_key_heads=sizes.num_kv_heads,
            scale=attention_scale(section, head_dim=sizes.head_dim),
        )

    def forward(self, x_BSD: torch.Tensor, *, rope: tuple[torch.Tensor, torch.Tensor], mask_B1ST: torch.Tensor) -> torch.Tensor:
        q_BSHE = self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            # In float32 under autocast too, like every other norm.
            q_BSHE, k_BSKE = self.q_norm(at_least_float32(q_BSHE)), self.k_norm(at_least_float32(k_BSKE))
        q_BHSE, k_BKTE, v_BKTE = rotate(q_BSHE, rope).transpose(1, 2), rotate(k_BSKE, rope).transpose(1, 2), v_BSKE.transpose(1, 2)
        out_BHSE = self.core(q_BHSE, k_BKTE, v_BKTE, mask_B1ST=mask_B1ST)
        out_BSD: torch.Tensor = self.wo(out_BHSE.transpose(1, 2).flatten(2))
        return out_BSD


def largest_logits(q_BHSE: torch.Tensor, k_BKTE: torch.Tensor, *, mask_B1ST: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Local. largest_BH, float32: of q k / sqrt(E), or times `scale`, where the mask allows. Head by head, so that it fits."""
    group, num_queries = q_BHSE.shape[1] // k_BKTE.shape[1], q_BHSE.shape[2]
    factor = scale if scale is not None else q_BHSE.shape[-1] ** -0.5
    at_once = max(1, _MAX_SCORES // max(1, q_BHSE.shape[0] * k_BKTE.shape[2]))
    heads = []
    with torch.autocast(q_BHSE.device.type, enabled=False):
        for head in range(q_BHSE.shape[1]):
            keys_BET = k_BKTE[:, head // group].float().transpose(1, 2)
            found_B = torch.full(q_BHSE.shape[:1], -torch.inf, device=q_BHSE.device)
            for first in range(0, num_queries, at_once):
                scores_BST = (q_BHSE[:, head, first : first + at_once].float() @ keys_BET).mul_(factor)
                scores_BST.masked_fill_(~mask_B1ST[:, 0, first : first + at_once], -torch.inf)
                found_B = torch.maximum(found_B, scores_BST.amax(dim=(1, 2)))
            heads.append(found_B)
    return torch.stack(heads, dim=1)


def _capped_attention(
    q_BHSE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, *, mask_B1ST: torch.Tensor, cap: float, scale: float | None
) -> torch.Tensor:
    """Attention whose logits pass through cap * tanh(x / cap) (Gemma 2). No fused kernel has it, so scores_BHST exist in memory."""
    group = q_BHSE.shape[1] // k_BKTE.shape[1]
    k_BHTE, v_BHTE = k_BKTE.repeat_interleave(group, dim=1), v_BKTE.repeat_interleave(group, dim=1)
    scores_BHST = at_least_float32(q_BHSE @ k_BHTE.transpose(-1, -2)) * (scale or q_BHSE.shape[-1] ** -0.5)
    scores_BHST = cap * torch.tanh(scores_BHST / cap)
    weights_BHST = scores_BHST.masked_fill(~mask_B1ST, -torch.inf).softmax(dim=-1)
    return weights_BHST.type_as(v_BHTE) @ v_BHTE
