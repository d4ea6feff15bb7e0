"""Memory of one device, term by term: states, what micro-batches in flight keep, buffers, and what lies outside torch's allocator. Pure.

A sum of what is there when the backward of the last micro-batch in flight begins. With a single micro-batch it is an upper bound: gradients
are counted beside activations, and both are there from the second one on. `EXCLUDED` names what is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from surefoot.core.errors import PlanInfeasible
from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.memory.activations import Cut, Kept, kept_by_micro_batch
from surefoot.plan.memory.implementations import SUREFOOT, Implementation
from surefoot.plan.memory.stage_shares import StageShare, heaviest_candidates, in_flight, stage_shares
from surefoot.plan.records import Layout, Reason, Workload

CONTEXT_BYTES = 0.66e9
"""The CUDA context with its kernels: 1.06 GB beside torch were seen on an H100 (NVIDIA/nccl issue 1685), one communicator among them."""

PROCESS_BYTES = 0.28e9
"""A rank on a CPU before it has a tensor: resident after the imports of training, torch 2.13 (measured)."""

CONNECTION_BYTES = 32 * 12 * (1 << 20)
"""A neighbour in a communicator of NCCL: 32 channels of 10 and 2 MiB, from the same report, whose all-to-all added 3.3 GB for 7 neighbours.
A ring has one to send to and one to receive from, which share them."""

FRAGMENTATION = 0.095
"""Share of the short-lived tensors by which torch's allocator reserves more than is allocated. Calibrated: `fragmentation_of` the 13 peaks
of nanotron that tests/reference reads; without one of them it is 0.090 to 0.096."""

MARGIN = 0.06
"""Of the total, kept free by `fits`: on the worst of those peaks the total was 5% too low."""

EXCLUDED = (
    "uneven routing of tokens to experts: each is taken to get its part",
    "a z-loss and caps on logits or scores, which keep further tensors of their size",
    "evaluation, generation, and a checkpoint's staging buffers on the device",
    "tables, masks and norms of a few bytes per token that are gone within a layer",
    "memory of other processes on the device",
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on a device of `stage`, and how many parameters it holds: unsharded over data ranks, and its own part of them."""

    stage: int
    num_parameters: int
    num_parameters_sharded: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    embedding_and_head: float
    cast_weights: float
    logits_and_loss: float
    workspace: float
    unsharded: float
    communication_buffers: float
    fragmentation: float
    nccl: float
    framework: float

    @property
    def states(self) -> float:
        """What a checkpoint is made of, and the gradients."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """In tensors: torch.cuda.max_memory_allocated()."""
        tensors = self.activations + self.embedding_and_head + self.cast_weights + self.logits_and_loss + self.workspace
        return self.states + tensors + self.unsharded + self.communication_buffers

    @property
    def reserved(self) -> float:
        """By torch's allocator: torch.cuda.max_memory_reserved()."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> float:
        """Of the device, as nvidia-smi counts."""
        return self.reserved + self.nccl + self.framework

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "states": self.states, "reserved": self.reserved, "total": self.total}


def estimate(workload: Workload, layout: Layout, *, stage: int | None = None, implementation: Implementation = SUREFOOT) -> Memory:
    """Of a device of `stage`; of the stage that needs most where None. Raises PlanInfeasible where a stage would have no layer."""
    kept = kept_by_micro_batch(workload, Cut(layout.tp, layout.cp, layout.ep, layout.micro_batch_size, layout.recompute), implementation)
    if stage is not None:
        if not 0 <= stage < layout.pp:
            raise PlanInfeasible(f"there is no stage {stage} among {layout.pp}", where="pp", hint=f"0 to {layout.pp - 1}", got=stage)
        return _of_stage(workload, layout, stage, kept, implementation)
    candidates = heaviest_candidates(workload.sizes, pp=layout.pp, chunks=layout.pp_chunks, balance=implementation.balance)
    if len(candidates) == 1:
        return _of_stage(workload, layout, 0, kept, implementation)
    return max((_of_stage(workload, layout, one, kept, implementation) for one in candidates), key=lambda memory: memory.total)


def fits(memory: Memory, memory_bytes: float, *, margin: float = MARGIN) -> bool:
    """Whether a card that offers `memory_bytes` holds it, with `margin` of the estimate to spare."""
    return memory.total * (1.0 + margin) <= memory_bytes


def fragmentation_of(peaks: Iterable[tuple[Memory, float]]) -> float:
    """The share that makes the mean relative error of `Memory.reserved` least over estimates with their measured max_memory_reserved()."""
    slopes: list[tuple[float, float]] = []
    for memory, measured_bytes in peaks:
        short_lived = _short_lived(memory)
        slopes.append(((measured_bytes - memory.allocated) / short_lived, short_lived / measured_bytes))
    slopes.sort()
    half = sum(weight for _, weight in slopes) / 2.0
    for share, weight in slopes:
        half -= weight
        if half <= 0:
            return max(0.0, share)
    raise PlanInfeasible("no peaks to calibrate on", where="measured", hint="give at least one")


def _short_lived(memory: Memory) -> float:
    return memory.activations + memory.embedding_and_head + memory.cast_weights + memory.logits_and_loss + memory.workspace


class _Weights(NamedTuple):
    """Elements on one rank of `tp` and `ep`, before anything is cut over data ranks."""

    layer: float
    layer_experts: float
    embedding: float
    head: float
    last_norm: int


@lru_cache(maxsize=1024)
def _weights(sizes: ModelSizes, *, tp: int, ep: int) -> _Weights:
    """Norms and routers are whole on every rank of `tp`."""
    width = sizes.d_model
    norms = 2 * width + (2 * sizes.head_dim if sizes.qk_norm else 0)
    dense = sizes.num_shared_experts if sizes.num_experts else 1
    layer = norms + sizes.num_experts * width + (sizes.attention_matrices + dense * sizes.expert_matrices) / tp
    matrix = sizes.vocab_size * width / tp
    return _Weights(layer, sizes.num_experts * sizes.expert_matrices / (tp * ep), matrix, matrix, width)


class _Held(NamedTuple):
    """Elements of a stage: dense ones and experts apart, for they are cut over different numbers of data ranks."""

    dense: float
    experts: float
    dense_shards: int
    expert_shards: float

    @property
    def whole(self) -> float:
        return self.dense + self.experts

    @property
    def shard(self) -> float:
        return self.dense / self.dense_shards + self.experts / self.expert_shards


def _of_stage(workload: Workload, layout: Layout, stage: int, kept: Kept, implementation: Implementation) -> Memory:
    sizes, dtypes = workload.sizes, workload.dtypes
    share = stage_shares(sizes, pp=layout.pp, chunks=layout.pp_chunks, balance=implementation.balance)[stage]
    weights = _weights(sizes, tp=layout.tp, ep=layout.ep)
    held = _held(sizes, layout, share, weights)
    num_micro_batches = max(1, -(-workload.global_batch_size // (layout.micro_batch_size * layout.data_ranks)))
    if implementation.receives_all:
        num_micro_batches = max(num_micro_batches, layout.pp)  # its pipeline fills up with phantoms, which are computed
    chunks, layers = in_flight(stage, share, pp=layout.pp, num_micro_batches=num_micro_batches, schedule=layout.pp_schedule)
    at_loss = min(layout.pp, num_micro_batches) if layout.pp > 1 and layout.pp_schedule == "zero_bubble" else 1
    parameters, gradients, unsharded, buffers = _cut_states(workload, layout, held, weights, share, implementation)
    activations = layers * kept.block
    ends = chunks * kept.tables + (chunks / layout.pp_chunks * kept.first if share.has_first else 0.0)
    ends += at_loss * kept.last if share.has_last else 0.0
    casts = layers * kept.block_casts + (at_loss * kept.head_casts if share.has_last else 0.0)
    loss = at_loss * kept.logits + kept.loss_buffers if share.has_last else 0.0
    workspace = max(0.0, kept.workspace - (kept.loss_buffers if share.has_last else 0.0))
    return Memory(
        stage=stage,
        num_parameters=round(held.whole),
        num_parameters_sharded=round(held.shard),
        parameters=parameters,
        gradients=gradients,
        optimizer=(dtypes.master + dtypes.moments) * held.shard,
        activations=activations,
        embedding_and_head=ends,
        cast_weights=casts,
        logits_and_loss=loss,
        workspace=workspace,
        unsharded=unsharded,
        communication_buffers=buffers + _passed_on(layout, share, kept, implementation, num_micro_batches=num_micro_batches, chunks=chunks),
        fragmentation=FRAGMENTATION * (activations + ends + casts + loss + workspace),
        nccl=0.0 if implementation.on_cpu else _connections(layout) * CONNECTION_BYTES,
        framework=PROCESS_BYTES if implementation.on_cpu else CONTEXT_BYTES,
    )


def _held(sizes: ModelSizes, layout: Layout, share: StageShare, weights: _Weights) -> _Held:
    """Ranks of `cp` share weights out like those of `dp_shard`. An expert is on 1 / ep of the data ranks, so fewer are left to share it."""
    dense = share.num_layers * weights.layer
    if share.has_first:
        dense += weights.embedding
    if share.has_last:
        dense += weights.last_norm
        if not (sizes.tie_embeddings and share.has_first):
            dense += weights.head
    shards = layout.dp_shard * layout.cp
    return _Held(dense, share.num_layers * weights.layer_experts, shards, max(1.0, shards / layout.ep))


def _cut_states(
    workload: Workload, layout: Layout, held: _Held, weights: _Weights, share: StageShare, implementation: Implementation
) -> tuple[float, float, float, float]:
    """(parameters, gradients, what is gathered beside the shards, buffers of reductions)."""
    dtypes, pipelined = workload.dtypes, layout.pp > 1
    if held.dense_shards == 1 and not (implementation.fully_shards and layout.num_devices > layout.dp_replicate):
        bucket = implementation.bucket_bytes * held.whole if layout.data_ranks > 1 else 0.0
        return dtypes.weight * held.whole, dtypes.grad * held.whole, 0.0, bucket
    layer = weights.layer + weights.layer_experts
    ends = (weights.embedding if share.has_first else 0.0, weights.head if share.has_last else 0.0)
    largest = max(layer, *ends)
    cuts_weights = implementation.fully_shards or layout.zero_stage == 3
    parameters = dtypes.weight * (held.shard if cuts_weights else held.whole)
    if not cuts_weights:
        unsharded = 0.0
    elif layout.zero_stage < 3 or pipelined:
        unsharded = dtypes.weight * held.whole  # a pipeline's backward leaves its stage gathered for the next forward
    else:
        unsharded = dtypes.weight * (layer + largest + weights.last_norm)  # the one in use, and the next one on its way
    if layout.zero_stage == 1 or (pipelined and implementation.whole_gradients):
        return parameters, dtypes.grad * held.whole, unsharded, 0.0
    return parameters, dtypes.grad * held.shard, unsharded, (dtypes.grad + dtypes.reduce) * largest


def _passed_on(
    layout: Layout, share: StageShare, kept: Kept, implementation: Implementation, *, num_micro_batches: int, chunks: int
) -> float:
    """Standing buffers of tensor parallel, and what a pipeline receives into: activations from before, gradients from behind."""
    standing = implementation.gather_buffers * kept.boundary * layout.tp if layout.tp > 1 else 0.0
    if layout.pp == 1:
        return standing
    received = layout.pp_chunks - share.has_first, layout.pp_chunks - share.has_last
    if not implementation.receives_all:
        return standing + sum(received) * kept.boundary
    # The first block keeps what it received: counted as its activation already.
    activations = received[0] * num_micro_batches - min(chunks, received[0] * num_micro_batches) * received[0] / layout.pp_chunks
    leaving = chunks * received[1] / layout.pp_chunks
    return standing + (activations + received[1] * num_micro_batches + leaving) * kept.boundary


def _connections(layout: Layout) -> int:
    """A ring along each axis; the all-to-all of experts has every rank of a node, 8 at most, for a neighbour."""
    rings = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.dp_shard, layout.dp_replicate))
    return rings + min(layout.ep, 8) - 1


TERMS: dict[str, Reason] = {
    "parameters": Reason(
        "weights in their own dtype: cut over tp and pp, experts over ep, shards over data ranks", "ZeRO, arXiv 1910.02054"
    ),
    "gradients": Reason("as the weights; whole over data ranks under stage 1 and in a pipeline", "ZeRO, arXiv 1910.02054"),
    "optimizer": Reason("masters and moments, cut over dp_shard and cp under every stage", "ZeRO, arXiv 1910.02054"),
    "activations": Reason("what blocks keep for the backward, times the micro-batches in flight", "counted; arXiv 2205.05198"),
    "embedding_and_head": Reason("token ids, tables of positions, the last norm and what enters the head", "counted"),
    "cast_weights": Reason("copies of the weights in the dtype of the products, made in each forward and kept for its backward", "counted"),
    "logits_and_loss": Reason("logits in float32 with what the cross-entropy makes of them, at its peak", "counted"),
    "workspace": Reason("gradients inside one block, and that block's activations where they are computed again", "counted"),
    "unsharded": Reason("weights that are gathered for use: two units, or the whole stage under ZeRO 1, 2 and in a pipeline", "arithmetic"),
    "communication_buffers": Reason("of reductions, of gathered inputs, and what a pipeline receives into", "counted"),
    "fragmentation": Reason(f"reserved beyond what is allocated: {FRAGMENTATION:.1%} of short-lived tensors", "calibrated on nanotron"),
    "nccl": Reason("buffers of each communicator, outside torch", "NVIDIA/nccl issue 1685"),
    "framework": Reason("the CUDA context and its kernels, outside torch", "NVIDIA/nccl issue 1685"),
}
"""Every term of `Memory`, in its order: what it is and who says so."""


def told(memory: Memory) -> Sequence[tuple[str, float, Reason]]:
    """(term, bytes, reason) of all there is: they sum to `memory.total`."""
    names = [field.name for field in fields(Memory) if field.name in TERMS]
    return [(name, getattr(memory, name), TERMS[name]) for name in names]
