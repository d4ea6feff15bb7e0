"""What the ranks of a layout tell each other in one step: bytes that a device sends, and how long that takes, axis by axis. Pure.

Nothing is hidden behind compute here; `throughput` says how much of it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.hardware import Accelerator
from surefoot.plan.layouts.links import Group, LinkRates, all_to_all_s, gather_s, pass_s, reduce_s
from surefoot.plan.memory.activations import boundary_bytes
from surefoot.plan.memory.implementations import Implementation
from surefoot.plan.memory.stage_shares import StageShare
from surefoot.plan.records import Layout, Recompute, Workload

AXES = ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate")

MESSAGES_PER_LAYER: Mapping[str, int] = {"nanotron": 6}
"""In how many parts one layer's weights are gathered and reduced where they are shared out. One unit by default (`fully_shard`, Megatron's
buckets); tensor by tensor in nanotron (src/nanotron/optim/zero.py): four matrices and two norms."""


def reduces_afterwards(layout: Layout, implementation: Implementation) -> bool:
    """Whether nothing of the reductions runs behind a backward: in surefoot's pipelines by the order of their schedule; in nanotron as
    inferred from its published step times, which leave no room for it, not from its source."""
    return implementation.name == "nanotron" or (layout.pp > 1 and is_surefoot(implementation))


def is_surefoot(implementation: Implementation) -> bool:
    return implementation.name.startswith("surefoot")


class Traffic(NamedTuple):
    """Bytes that one device sends, and seconds."""

    num_bytes: float
    seconds: float

    def times(self, number: float) -> Traffic:
        return Traffic(self.num_bytes * number, self.seconds * number)

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(self.num_bytes + other.num_bytes, self.seconds + other.seconds)


NONE = Traffic(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Wires:
    """What collectives run on."""

    hardware: Accelerator
    rates: LinkRates


def _gather(num_bytes: float, group: Group, wires: Wires, *, num_messages: float = 1.0) -> Traffic:
    seconds = gather_s(num_bytes, group, wires.hardware, wires.rates, num_messages=num_messages)
    return Traffic(num_bytes * (group.size - 1) / group.size, seconds)


def of_tensor_layer(workload: Workload, *, tokens: float, group: Group, wires: Wires, recompute: Recompute) -> Traffic:
    """One layer, one micro-batch of `tokens`. Positions are gathered before attention and before the feed-forward and reduced behind each:
    four in the forward, four in the backward (arXiv 2205.05198), and those of the forward again where it is computed again."""
    if group.size == 1:
        return NONE
    number = 12 if recompute == "full" else 8
    return _gather(tokens * workload.sizes.d_model * workload.dtypes.activation, group, wires).times(number)


def of_context_layer(workload: Workload, *, sequences: float, tp: int, group: Group, wires: Wires, recompute: Recompute) -> Traffic:
    """Keys and values of the whole sequence are gathered in the forward, and their gradients reduced in the backward."""
    if group.size == 1:
        return NONE
    sizes = workload.sizes
    elements = sequences * workload.seq_len * 2 * sizes.num_kv_heads * sizes.head_dim / tp
    return _gather(elements * workload.dtypes.activation, group, wires).times(3 if recompute == "full" else 2)


def of_expert_layer(workload: Workload, *, tokens: float, tp: int, group: Group, wires: Wires, recompute: Recompute) -> Traffic:
    """Tokens to their experts and back, forward and backward: four all-to-all."""
    if group.size == 1:
        return NONE
    num_bytes = tokens / tp * workload.sizes.experts_per_token * workload.sizes.d_model * workload.dtypes.activation
    seconds = all_to_all_s(num_bytes, group, wires.hardware, wires.rates)
    return Traffic(num_bytes * (group.size - 1) / group.size, seconds).times(6 if recompute == "full" else 4)


def of_passing(workload: Workload, *, tokens: float, tp: int, group: Group, wires: Wires) -> Traffic:
    """One micro-batch from a piece to the next: what leaves a block, cut over tp."""
    if group.size == 1:
        return NONE
    num_bytes = boundary_bytes(workload, tokens=tokens, tp=tp)
    return Traffic(num_bytes, pass_s(num_bytes, group, wires.hardware, wires.rates))


ONE_LAYER = StageShare(1, (1,), has_first=False, has_last=False)


class StageWeights(NamedTuple):
    """Elements that one rank of tp and ep holds of its stage, and in how many units they are gathered."""

    dense: float
    experts: float
    num_units: int


def weights_of_stage(sizes: ModelSizes, share: StageShare, *, tp: int, ep: int) -> StageWeights:
    experts = sizes.num_experts * sizes.expert_matrices if sizes.num_experts else 0
    dense_ffs = sizes.num_shared_experts if sizes.num_experts else 1
    layer = sizes.attention_matrices + dense_ffs * sizes.expert_matrices + sizes.num_experts * sizes.d_model
    ends = share.has_first + (share.has_last and not (sizes.tie_embeddings and share.has_first))
    matrices = ends * sizes.vocab_size * sizes.d_model
    num_units = share.num_layers + ends + share.has_last  # the last norm is a unit
    return StageWeights((share.num_layers * layer + matrices) / tp, share.num_layers * experts / (tp * ep), num_units)


def of_sharding(
    workload: Workload,
    layout: Layout,
    weights: StageWeights,
    *,
    num_micro_batches: int,
    group: Group,
    wires: Wires,
    implementation: Implementation,
) -> Traffic:
    """Weights gathered and gradients reduced among the ranks that share one copy, in one step.

    Stages 1 and 2 move what an all-reduce would: gradients one way, weights the other. Stage 3 gathers weights again for the backward: 1.5
    times that with one micro-batch, and again for each of several (arXiv 1910.02054). Stage 2 reduces after each micro-batch; a pipeline
    once a step. Experts have fewer ranks to share them.
    """
    if group.size == 1:
        return NONE
    pipelined, stage = layout.pp > 1, layout.zero_stage
    gathers = 1 if stage < 3 else num_micro_batches * (1 if pipelined else 2)
    reduces = 1 if stage == 1 or pipelined else num_micro_batches
    elements = weights.dense + weights.experts * _left(group.size // layout.ep, of=group.size)
    messages = weights.num_units * MESSAGES_PER_LAYER.get(implementation.name, 1)
    gather = _gather(elements * workload.dtypes.weight, group, wires, num_messages=messages)
    reduce = _gather(elements * workload.dtypes.reduce, group, wires, num_messages=messages)
    return gather.times(gathers).plus(reduce.times(reduces))


def _left(size: int, *, of: int) -> float:
    """(k - 1) / k of a smaller group over (n - 1) / n of the larger."""
    return (1.0 - 1.0 / max(1, size)) / (1.0 - 1.0 / of)


def of_replicas(workload: Workload, layout: Layout, weights: StageWeights, *, group: Group, wires: Wires) -> Traffic:
    """Gradients of the shards, summed over whole copies once a step."""
    if group.size == 1:
        return NONE
    num_bytes = (weights.dense + weights.experts) / (layout.dp_shard * layout.cp) * workload.dtypes.reduce
    seconds = reduce_s(num_bytes, group, wires.hardware, wires.rates, num_messages=weights.num_units)
    return Traffic(2.0 * num_bytes * (group.size - 1) / group.size, seconds)
