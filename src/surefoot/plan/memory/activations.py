"""What one micro-batch leaves on a rank until its backward, block by block: counted for SwiGLU, grouped queries and RMSNorm. Pure.

The counting is that of arXiv 2205.05198 (Korthikanti et al.), redone: a tensor is kept where the gradient of an operator needs it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.memory.implementations import Implementation
from surefoot.plan.records import Recompute, Workload

LABEL_BYTES = 8  # token ids and labels are int64
STATISTIC_BYTES = 4  # of a norm, of a row of attention


class Kept(NamedTuple):
    """Bytes of one micro-batch on one rank. `tables` are made by every piece of a pipeline, `first` is with the embedding, `last` with the
    head. `casts` are copies of the weights of a block (of the head) in the dtype of its products, which
    autocast makes in every forward and the backward needs. `workspace` is what the backward of one block has at once beside all that."""

    block: float
    tables: float
    first: float
    last: float
    logits: float
    loss_buffers: float
    block_casts: float
    head_casts: float
    workspace: float
    boundary: float


class Cut(NamedTuple):
    """What of a layout decides `Kept`."""

    tp: int
    cp: int
    ep: int
    micro_batch_size: int
    recompute: Recompute


@lru_cache(maxsize=8192)
def kept_by_micro_batch(workload: Workload, cut: Cut, implementation: Implementation) -> Kept:
    """`boundary` is what passes to the next stage."""
    sizes, dtypes = workload.sizes, workload.dtypes
    residual, dtype, tp = dtypes.weight, dtypes.activation, cut.tp
    tokens = cut.micro_batch_size * workload.seq_len / cut.cp
    pairs = tokens * workload.seq_len
    whole = _block(workload, cut, implementation, tokens=tokens, pairs=pairs)
    kept = _kept_of_block(workload, cut, implementation, whole=whole, tokens=tokens)
    casts = residual > dtype
    cast_layer = dtype * weights_to_cast(sizes, tp=tp, ep=cut.ep) if casts else 0.0
    recomputes = cut.recompute == "full" or (cut.recompute == "selective" and implementation.selective == "products")
    width = sizes.d_model
    buffers = tokens * (3 * dtype * _routed(sizes) * sizes.d_ff / tp + 2 * residual * width)
    tables = tokens * (4 * sizes.head_dim if implementation.rope_tables else 0) + (pairs if implementation.keeps_mask and recomputes else 0)
    norm = residual * width * implementation.norm_tensors / 2 + STATISTIC_BYTES
    head_input = dtype * width * (tp if implementation.keeps_gathered else 1)
    logits = tokens * sizes.vocab_size / tp
    return Kept(
        block=kept,
        tables=tables,
        first=tokens * LABEL_BYTES,
        last=tokens * ((norm + head_input) / tp + LABEL_BYTES),
        logits=implementation.logit_bytes[0] * logits,
        loss_buffers=(implementation.logit_bytes[1] - implementation.logit_bytes[0]) * logits,
        block_casts=0.0 if recomputes else cast_layer,
        head_casts=dtype * sizes.vocab_size * width / tp if casts else 0.0,
        workspace=buffers + (whole + cast_layer if recomputes else 0.0),
        boundary=boundary_bytes(workload, tokens=tokens, tp=tp),
    )


def boundary_bytes(workload: Workload, *, tokens: float, tp: int) -> float:
    """What passes from a stage to the next for a micro-batch of `tokens`: the residual stream, in the dtype of the weights, cut over tp."""
    return tokens * workload.sizes.d_model * workload.dtypes.weight / tp


def weights_to_cast(sizes: ModelSizes, *, tp: int, ep: int) -> float:
    """Elements of one layer's matrices on a rank, gathered."""
    if not sizes.num_experts:
        return (sizes.attention_matrices + sizes.expert_matrices) / tp
    routed = sizes.num_experts * sizes.expert_matrices / ep
    return (sizes.attention_matrices + sizes.num_shared_experts * sizes.expert_matrices + routed) / tp


def _routed(sizes: ModelSizes) -> int:
    """SwiGLUs that a token passes through."""
    return sizes.experts_per_token + sizes.num_shared_experts if sizes.num_experts else 1


def _block(workload: Workload, cut: Cut, implementation: Implementation, *, tokens: float, pairs: float) -> float:
    """All that a block's gradients need, nothing computed again."""
    sizes, dtypes, tp = workload.sizes, workload.dtypes, cut.tp
    residual, dtype, width = dtypes.weight, dtypes.activation, sizes.d_model
    norms = residual * implementation.norm_tensors * width + 2 * STATISTIC_BYTES
    num_inputs = sum(implementation.cast_inputs if residual > dtype else implementation.inputs)
    inputs = dtype * width * num_inputs * (tp if implementation.keeps_gathered else 1)
    held = dtype * width * implementation.held_whole * tp if tp > 1 else 0
    per_token = (
        norms + inputs + held + _attention(sizes, cut, implementation, dtype=dtype) + _feed_forward(sizes, cut, implementation, dtype)
    )
    per_pair = (dtype * tp if implementation.keeps_mask else 0) + (
        0 if workload.fused_attention else _scores(workload, cut, implementation)
    )
    return (tokens * per_token + pairs * per_pair) / tp


def _scores(workload: Workload, cut: Cut, implementation: Implementation) -> float:
    """Scores are quadratic in the length; "selective" of Megatron's kind drops nothing else."""
    dropped = cut.recompute == "selective" and implementation.selective == "scores"
    return 0 if dropped else implementation.score_bytes * workload.sizes.num_heads


def _attention(sizes: ModelSizes, cut: Cut, implementation: Implementation, *, dtype: int) -> float:
    """Queries, keys, values, what comes out, and a statistic per head; norms of queries and keys work in float32."""
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    gathered = cut.cp if implementation.gathers_keys else 1
    kept = dtype * (implementation.queries * queries + implementation.keys_values * keys * gathered) + STATISTIC_BYTES * sizes.num_heads
    if sizes.qk_norm:
        kept += 4 * (queries + keys) * implementation.norm_tensors // 2 + STATISTIC_BYTES * (sizes.num_heads + sizes.num_kv_heads)
    return kept


def _feed_forward(sizes: ModelSizes, cut: Cut, implementation: Implementation, dtype: int) -> float:
    """With experts: scores of the router in float32 with their softmax, and what each token's experts take in and give out. A token has as
    many experts under any `ep`: it moves them, and what is kept stays the same on average."""
    kept: float = dtype * implementation.feed_forward * _routed(sizes) * sizes.d_ff
    if sizes.num_experts:
        kept += 2 * 4 * sizes.num_experts + dtype * sizes.experts_per_token * sizes.d_model * (cut.tp + 1)
    return kept


def _kept_of_block(workload: Workload, cut: Cut, implementation: Implementation, *, whole: float, tokens: float) -> float:
    """Under `recompute`. "full": what enters. "selective" of our kind: that, and what products and attention give."""
    sizes, dtypes, tp = workload.sizes, workload.dtypes, cut.tp
    entering = tokens * dtypes.weight * sizes.d_model / tp
    if cut.recompute == "full":
        return entering
    if cut.recompute == "none" or implementation.selective == "scores":
        return whole
    heads = (2 * sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim  # queries, keys, values; what attention gives
    leaving = sizes.d_model * (1 + _routed(sizes)) * tp  # partial sums, whole on every rank
    products = dtypes.activation * (heads + leaving + 2 * _routed(sizes) * sizes.d_ff) + STATISTIC_BYTES * sizes.num_heads
    scores = 0 if workload.fused_attention else dtypes.activation * sizes.num_heads * workload.seq_len
    return entering + tokens * (products + scores) / tp
