"""How long a step of a layout takes: products, what lies between them, collectives that are not hidden, the bubble, the update. Pure.

FLOPs are exact (`core.model_sizes`), links and peaks those of the data sheet, and a `Calibration` says what share of them arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from surefoot.core.model_sizes import attended_pairs
from surefoot.plan.hardware import Accelerator
from surefoot.plan.layouts import communication as talk
from surefoot.plan.layouts.calibration import DEFAULT, Calibration
from surefoot.plan.layouts.communication import Traffic, Wires
from surefoot.plan.layouts.links import groups_of
from surefoot.plan.layouts.pipeline_schedule import num_scheduled
from surefoot.plan.layouts.pipeline_timeline import PieceTimes
from surefoot.plan.memory.activations import boundary_bytes
from surefoot.plan.memory.implementations import SUREFOOT, Implementation
from surefoot.plan.memory.stage_shares import stage_shares
from surefoot.plan.records import Layout, Workload

ATTENTION_BACKWARD = 2.5
"""Of a fused attention's forward: five products for two, for it computes the scores again (arXiv 2307.08691). Otherwise 2."""

PASSES_PER_LAYER = 20
"""Reads and writes of a tensor of width d_model in one layer's forward: two norms (4), two additions (6), rotation and copies (10)."""

PASSES_OF_FEED_FORWARD = 3
"""Of a tensor of width d_ff: gate and up are read, their product is written."""

PASSES_OF_LOGITS = 6
"""Of the logits in float32: cast, maximum, exponentials and sum, backward, cast."""

BACKWARD_SHARE = 2.0 / 3.0
"""Of a micro-batch's time. Gradients of whole copies are summed behind the backward of the last one. Where states are sharded, weights are
gathered behind the first forward besides: together the time of one micro-batch."""


class LayerTimes(NamedTuple):
    """Seconds of one micro-batch through one layer, collectives included as far as they are not hidden."""

    forward_s: float
    backward_s: float
    weight_s: float
    tensor_s: float
    context_s: float
    expert_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.weight_s


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, by what they are spent on; they sum to `total_s`. `num_micro_batches` includes phantoms.

    `traffic`: bytes that a device sends, and seconds before anything is hidden, by axis.
    """

    compute_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    passing_s: float
    bubble_s: float
    data_s: float
    update_s: float
    num_micro_batches: int
    traffic: dict[str, Traffic] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        inside = self.compute_s + self.tensor_s + self.context_s + self.expert_s
        return inside + self.passing_s + self.bubble_s + self.data_s + self.update_s

    def as_dict(self) -> dict[str, object]:
        names = ("compute_s", "tensor_s", "context_s", "expert_s", "passing_s", "bubble_s", "data_s", "update_s", "total_s")
        told: dict[str, object] = {name: getattr(self, name) for name in names}
        return told | {
            "num_micro_batches": self.num_micro_batches,
            "traffic": {axis: {"bytes": sent.num_bytes, "seconds": sent.seconds} for axis, sent in self.traffic.items()},
        }


@dataclass(frozen=True)
class StepModel:
    """Asked for many layouts of one workload; what they have in common is computed once.

    A measured calibration holds for the program that was measured, so its collectives are counted as that program makes them.
    """

    workload: Workload
    hardware: Accelerator
    calibration: Calibration = DEFAULT
    implementation: Implementation = SUREFOOT
    dtype: str = "bf16"
    _layers: dict[tuple[object, ...], tuple[LayerTimes, Traffic, Traffic, Traffic]] = field(default_factory=dict)

    def mfu(self, step_s: float, num_devices: int) -> float:
        """Exact FLOPs, attention causal and the head counted, over the dense peak. Recomputation is no use."""
        return self.workload.flops_per_step / (step_s * num_devices * self.hardware.peak_flops(self.dtype))

    def num_micro_batches(self, layout: Layout) -> int:
        """Those that a data rank has to run, phantoms included."""
        number = self.num_asked(layout)
        pads = layout.pp > 1 and talk.is_surefoot(self.implementation)
        return num_scheduled(number, pp=layout.pp, schedule=layout.pp_schedule) if pads else number

    def num_asked(self, layout: Layout) -> int:
        """Those that the batch comes to."""
        return -(-self.workload.global_batch_size // (layout.micro_batch_size * layout.data_ranks))

    def step(self, layout: Layout) -> StepTime:
        """By closed forms; `pipeline_timeline` plays the same pieces out."""
        inner = self.inner(layout)
        data_s, traffic = self._data(layout, micro_batch_s=(inner.compute_s + inner.tensor_s) / inner.num_micro_batches)
        parts = (inner.compute_s, inner.tensor_s, inner.context_s, inner.expert_s, inner.passing_s, inner.bubble_s)
        update_s = self._update_s(layout)
        return StepTime(*parts, data_s, update_s, inner.num_micro_batches, inner.traffic | traffic)

    def inner(self, layout: Layout) -> StepTime:
        """Without what data ranks tell each other, and without the update: no layout with these axes and pieces is faster."""
        number = self.num_micro_batches(layout)
        layer, tensor, context, expert = self.layer(layout)
        head_s = self._head_s(layout)
        shares = stage_shares(self.workload.sizes, pp=layout.pp, chunks=layout.pp_chunks, balance=self.implementation.balance)
        layer_s = layer.total_s
        times = [share.num_layers * layer_s + (head_s if share.has_last else 0.0) for share in shares]
        slowest = max(range(layout.pp), key=times.__getitem__)
        num_layers = shares[slowest].num_layers
        kept_s = self._accumulation_s(layout, num_layers)
        waiting_s = sum(times) - times[slowest] + (layout.pp - 1) * kept_s
        if layout.pp_schedule == "zero_bubble":
            waiting_s *= 1.0 - 2.0 * layer.weight_s / layer_s
        inside = [part * num_layers * number for part in (layer.tensor_s, layer.context_s, layer.expert_s)]
        passing_s, passing = self._passing(layout, number)
        traffic = {"tp": tensor, "cp": context, "ep": expert}
        told = {axis: sent.times(num_layers * number) for axis, sent in traffic.items() if sent.num_bytes}
        return StepTime(
            compute_s=number * (times[slowest] + kept_s) - sum(inside),
            tensor_s=inside[0],
            context_s=inside[1],
            expert_s=inside[2],
            passing_s=passing_s,
            bubble_s=waiting_s / layout.pp_chunks,
            data_s=0.0,
            update_s=0.0,
            num_micro_batches=number,
            traffic=told | ({"pp": passing} if layout.pp > 1 else {}),
        )

    def pieces(self, layout: Layout) -> tuple[PieceTimes, ...]:
        """Of one micro-batch, for `pipeline_timeline.simulate`."""
        layer = self.layer(layout)[0]
        head_s = self._head_s(layout)
        num_pieces = layout.pp * layout.pp_chunks
        shares = stage_shares(self.workload.sizes, pp=num_pieces, chunks=1, balance=self.implementation.balance)
        times = []
        for share in shares:
            kept_s = self._accumulation_s(layout, share.num_layers)
            forward_s, backward_s, weight_s = (share.num_layers * part for part in layer[:3])
            last_s = head_s / 3.0 if share.has_last else 0.0
            times.append(PieceTimes(forward_s + last_s, backward_s + last_s, weight_s + last_s + kept_s))
        return tuple(times)

    def passing_of_one_s(self, layout: Layout) -> float:
        group = groups_of(layout, self.hardware.devices_per_node)["pp"]
        return talk.of_passing(self.workload, tokens=self._tokens(layout), tp=layout.tp, group=group, wires=self._wires).seconds

    def layer(self, layout: Layout) -> tuple[LayerTimes, Traffic, Traffic, Traffic]:
        """Of one micro-batch through one layer, with what tp, cp and ep send for it."""
        key = (layout.tp, layout.cp, layout.ep, layout.recompute, layout.micro_batch_size)
        if key not in self._layers:
            self._layers[key] = self._layer(layout)
        return self._layers[key]

    def _layer(self, layout: Layout) -> tuple[LayerTimes, Traffic, Traffic, Traffic]:
        sizes, tokens = self.workload.sizes, self._tokens(layout)
        num_ffs = sizes.experts_per_token + sizes.num_shared_experts if sizes.num_experts else 1
        matrices = sizes.attention_matrices + num_ffs * sizes.expert_matrices
        products_s = 2.0 * tokens * matrices / layout.tp / self._flops_per_s
        pairs = layout.micro_batch_size * attended_pairs(self.workload.seq_len, window=sizes.window) / layout.cp
        attention_s = 4.0 * sizes.num_heads * sizes.head_dim * pairs / layout.tp / (self._flops_per_s * self.calibration.attention)
        width = PASSES_PER_LAYER * sizes.d_model + PASSES_OF_FEED_FORWARD * num_ffs * sizes.d_ff
        between_s = tokens * width * self.workload.dtypes.activation / layout.tp / self._bytes_per_s
        attention_back = ATTENTION_BACKWARD if self.workload.fused_attention else 2.0
        again_s = {"none": 0.0, "selective": between_s, "full": products_s + attention_s + between_s}[layout.recompute]
        tensor, context, expert = self._inside(layout, tokens)
        shown = 1.0 - (self.calibration.hidden_tensor if self._hides_tensor else 0.0)
        told = (tensor.seconds * shown, context.seconds * shown, expert.seconds * shown)
        forward_s = products_s + attention_s + between_s + sum(told) / 3.0
        backward_s = products_s + attention_back * attention_s + 2.0 * between_s + again_s + sum(told) * 2.0 / 3.0
        return LayerTimes(forward_s, backward_s, products_s, *told), tensor, context, expert

    def _inside(self, layout: Layout, tokens: float) -> tuple[Traffic, Traffic, Traffic]:
        groups = groups_of(layout, self.hardware.devices_per_node)
        wires, work, tp, how = self._wires, self.workload, layout.tp, layout.recompute
        return (
            talk.of_tensor_layer(work, tokens=tokens, group=groups["tp"], wires=wires, recompute=how),
            talk.of_context_layer(work, sequences=layout.micro_batch_size, tp=tp, group=groups["cp"], wires=wires, recompute=how),
            talk.of_expert_layer(work, tokens=tokens, tp=tp, group=groups["ep"], wires=wires, recompute=how),
        )

    def _head_s(self, layout: Layout) -> float:
        """Logits and loss, forward and backward."""
        sizes, tokens = self.workload.sizes, self._tokens(layout)
        logits = tokens * sizes.vocab_size / layout.tp
        return 6.0 * logits * sizes.d_model / self._flops_per_s + 4.0 * PASSES_OF_LOGITS * logits / self._bytes_per_s

    def _accumulation_s(self, layout: Layout, num_layers: int) -> float:
        """Of one micro-batch: weights are read twice, and gradients added to what is there; under stages 2 and 3 only to a shard."""
        dtypes, elements = self.workload.dtypes, num_layers * self._layer_weights(layout)
        keeps_whole = layout.zero_stage == 1 or layout.dp_shard * layout.cp == 1 or layout.pp > 1
        per_element = 2 * dtypes.weight + 2 * (dtypes.grad if keeps_whole else dtypes.reduce)
        return elements * per_element / self._bytes_per_s

    def _layer_weights(self, layout: Layout) -> float:
        weights = talk.weights_of_stage(self.workload.sizes, talk.ONE_LAYER, tp=layout.tp, ep=layout.ep)
        return weights.dense + weights.experts

    def _passing(self, layout: Layout, number: int) -> tuple[float, Traffic]:
        """Of a middle stage: every piece is passed on, and its gradient back. The first ones fill the pipeline and are never hidden."""
        if layout.pp == 1:
            return 0.0, talk.NONE
        one_s = self.passing_of_one_s(layout)
        num_passed = 2 * number * layout.pp_chunks
        shown = num_passed * (1.0 - self.calibration.hidden_data) + 2 * (layout.pp - 1)
        sent = boundary_bytes(self.workload, tokens=self._tokens(layout), tp=layout.tp) * num_passed
        return shown * one_s, Traffic(sent, num_passed * one_s)

    def _data(self, layout: Layout, *, micro_batch_s: float) -> tuple[float, dict[str, Traffic]]:
        """Gathering of weights and reduction of gradients: what is not hidden, and all of it by axis."""
        groups, number = groups_of(layout, self.hardware.devices_per_node), self.num_micro_batches(layout)
        weights = self._heaviest_stage(layout)
        sharding = talk.of_sharding(
            self.workload, layout, weights,
            num_micro_batches=number, group=groups["shard"], wires=self._wires, implementation=self.implementation,
        )  # fmt: skip
        replicas = talk.of_replicas(self.workload, layout, weights, group=groups["dp_replicate"], wires=self._wires)
        seconds, traffic = sharding.seconds + replicas.seconds, {"dp_shard": sharding, "dp_replicate": replicas}
        told = {axis: sent for axis, sent in traffic.items() if sent.num_bytes}
        if talk.reduces_afterwards(layout, self.implementation):
            return seconds, told
        hidden = self.calibration.hidden_data
        sharded = layout.dp_shard * layout.cp > 1
        window_s = micro_batch_s * (number if sharded and layout.zero_stage > 1 else 1.0 if sharded else BACKWARD_SHARE)
        return max(seconds * (1.0 - hidden), seconds - hidden * window_s), told

    def _heaviest_stage(self, layout: Layout) -> talk.StageWeights:
        sizes = self.workload.sizes
        shares = stage_shares(sizes, pp=layout.pp, chunks=layout.pp_chunks, balance=self.implementation.balance)
        candidates = (shares[0], shares[-1], max(shares, key=lambda share: share.num_layers))
        stages = [talk.weights_of_stage(sizes, share, tp=layout.tp, ep=layout.ep) for share in candidates]
        return max(stages, key=lambda weights: weights.dense + weights.experts)

    def _update_s(self, layout: Layout) -> float:
        """The norm reads every gradient; AdamW reads and writes masters and moments of its shard, and writes weights."""
        dtypes, weights = self.workload.dtypes, self._heaviest_stage(layout)
        shard = (weights.dense + weights.experts) / (layout.dp_shard * layout.cp)
        touched = shard * (2 * dtypes.grad + 2 * (dtypes.master + dtypes.moments) + 2 * dtypes.weight)
        return touched / self._bytes_per_s

    def _tokens(self, layout: Layout) -> float:
        return layout.micro_batch_size * self.workload.seq_len / layout.cp

    @property
    def _hides_tensor(self) -> bool:
        """Surefoot's collectives inside layers wait for the products around them, unless its own runs say otherwise."""
        return self.calibration.is_measured or not talk.is_surefoot(self.implementation)

    @property
    def _wires(self) -> Wires:
        return Wires(self.hardware, self.calibration.rates)

    @property
    def _flops_per_s(self) -> float:
        return self.hardware.peak_flops(self.dtype) * self.calibration.products

    @property
    def _bytes_per_s(self) -> float:
        return self.hardware.memory_bandwidth * self.calibration.memory
