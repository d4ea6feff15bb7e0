"""How a training program spends memory: what a block keeps for its backward, how states are cut, what lies around. One record per program.

The numbers are counts of tensors, read off the program's source or its saved tensors; none is fitted to a peak, except where it says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from surefoot.plan.records import Dtypes

Balance = Literal["blocks", "flops", "even"]


@dataclass(frozen=True, slots=True)
class Implementation:
    """Counts are elements per token: of width d_model, of all query heads, of key and value heads (both counted), of the feed-forward.

    `norm_tensors` are kept in the dtype of the residual stream (that of the weights) and split over `tp`. `cast_inputs`: how many copies of
    what enters attention and feed-forward are kept where weights are cast for each product, `inputs`: where they are not.
    `keeps_gathered`: inputs of products are kept whole on every rank of `tp`, else gathered again. `held_whole`: further tensors of width
    d_model that stay whole, per block, where tp > 1. `keeps_mask`: a mask of (query, key) in each layer. `gathers_keys`: context parallel
    keeps keys and values of the whole sequence. `score_bytes`: of one (head, query, key) where attention is not fused.

    `logit_bytes`: of one logit, what stays until the backward, and all there is at the peak of the loss.

    `fully_shards`: weights are cut over `dp_shard` in every stage and gathered for use, else only what the stage says. `whole_gradients`:
    a pipeline keeps its stage's gradients whole until the last micro-batch, whatever the stage. `bucket_bytes`: of one parameter, in
    buckets where nothing is sharded. `gather_buffers`: standing tensors of width d_model, whole, where tp > 1. `receives_all`: a pipeline
    has a buffer for each micro-batch of the step, not only for those in flight.
    """

    name: str
    source: str
    norm_tensors: int
    inputs: tuple[int, int]
    cast_inputs: tuple[int, int]
    queries: int
    keys_values: int
    feed_forward: int
    keeps_gathered: bool
    held_whole: int
    keeps_mask: bool
    gathers_keys: bool
    score_bytes: int
    rope_tables: bool
    selective: Literal["products", "scores"]
    logit_bytes: tuple[int, int]
    fully_shards: bool
    whole_gradients: bool
    bucket_bytes: int
    gather_buffers: int
    receives_all: bool
    balance: Balance
    on_cpu: bool = False


SUREFOOT = Implementation(
    name="surefoot",
    source="its own model: tensors counted by saved-tensor hooks; RMSNorm by its fused kernel, as on a GPU",
    norm_tensors=2,
    inputs=(1, 1),
    cast_inputs=(3, 2),  # autocast makes a copy for each of wq, wk, wv and for each of w1, w3
    queries=2,
    keys_values=2,
    feed_forward=4,  # w1 x, silu of it, w3 x, their product
    keeps_gathered=True,
    held_whole=0,
    keeps_mask=True,
    gathers_keys=True,
    score_bytes=10,
    rope_tables=True,
    selective="products",
    logit_bytes=(4, 12),  # log-softmax; its gradient and that of the loss beside it
    fully_shards=True,
    whole_gradients=True,
    bucket_bytes=4,  # gradients are made anew in each step, and a bucket takes them up with the last micro-batch only
    gather_buffers=0,
    receives_all=True,
    balance="blocks",
)

SUREFOOT_ON_CPU = replace(
    SUREFOOT,
    name="surefoot-cpu",
    source="as surefoot; RMSNorm in its parts, as torch has it on a CPU: the normalised input is kept too",
    norm_tensors=4,
    on_cpu=True,
)

MEGATRON = Implementation(
    name="megatron",
    source="Megatron-LM with sequence parallel, fused SwiGLU and FlashAttention; arXiv 2205.05198 without dropout",
    norm_tensors=2,
    inputs=(1, 1),
    cast_inputs=(1, 1),
    queries=2,
    keys_values=2,
    feed_forward=3,
    keeps_gathered=False,
    held_whole=0,
    keeps_mask=False,
    gathers_keys=False,
    score_bytes=2,  # the softmax; mask (1) and output (2) of its dropout make the paper's 5
    rope_tables=False,
    selective="scores",
    logit_bytes=(4, 8),
    fully_shards=False,
    whole_gradients=True,
    bucket_bytes=0,
    gather_buffers=1,
    receives_all=False,
    balance="even",
)

NANOTRON = replace(
    MEGATRON,
    name="nanotron",
    source=(
        "huggingface/nanotron, branch nouamane/bench2 (67c5ebb6): llama.py, tensor_parallel/functional.py, gradient_accumulator.py. "
        "held_whole is inferred from its published peaks, not from its source"
    ),
    keys_values=4,  # the buffer of the joint product stays with the queries; keys and values are copied out of it
    feed_forward=4,
    held_whole=2,  # what is reduced and scattered after attention and feed-forward: freed on the stream of the messages, which lags
    bucket_bytes=2,  # DistributedDataParallel without bucket views, where ZeRO is off
    gather_buffers=2,
    balance="flops",
)

FSDP = replace(
    SUREFOOT,
    name="fsdp",
    source="mosaicml/llm-foundry: FSDP with bf16 parameters, GELU, flash-attn's kernels for attention and cross-entropy",
    feed_forward=3,  # of a SwiGLU of equal size: 4 d_model go into the GELU and 4 come out, 8 / 3 of them are one width of three
    keeps_mask=False,
    gathers_keys=False,
    rope_tables=False,
    logit_bytes=(2, 4),
)

IMPLEMENTATIONS = {one.name: one for one in (SUREFOOT, SUREFOOT_ON_CPU, MEGATRON, NANOTRON, FSDP)}

SUREFOOT_BF16 = Dtypes(weight=4, grad=4, master=0, moments=8, activation=2, reduce=4)
"""bf16 products under autocast: weights, gradients, moments and the residual stream are float32, 16 bytes of states."""

SHARDED_BF16 = Dtypes(weight=2, grad=4, master=2, moments=8, activation=2, reduce=2)
"""FSDP that gathers and reduces in bf16: 16 bytes of states in shards of float32. The master is counted without the 2 of the weight."""
