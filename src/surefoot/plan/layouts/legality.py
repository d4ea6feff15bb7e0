"""Which layouts can be run, and why others cannot: whole heads, stages and parts of a sequence, experts that divide data ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from surefoot.plan.hardware import Accelerator
from surefoot.plan.layouts.pipeline_schedule import closed_form, fewest_micro_batches
from surefoot.plan.memory.estimate import MARGIN
from surefoot.plan.records import Layout, Workload

MIN_POSITIONS = 512
"""Of a sequence on one rank of cp. With fewer, the products of a layer are too thin to hide that keys and values go round."""


class Refusal(NamedTuple):
    """`kind` groups them: tp, cp, pp, ep, node, batch, schedule, bubble, memory."""

    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_bubble` of the whole step. `tp_beyond_node`: whether tp may leave a node. `margin`: memory that stays free, of the estimate."""

    max_bubble: float = 0.15
    tp_beyond_node: bool = False
    margin: float = MARGIN
    max_micro_batch_size: int = 16
    max_chunks: int = 8


DEFAULT_LIMITS = Limits()


def axes_refusals(workload: Workload, hardware: Accelerator, layout: Layout, limits: Limits = DEFAULT_LIMITS) -> Iterator[Refusal]:
    """What the axes alone decide, whatever the schedule, the sharding and the micro-batch."""
    yield from _tensor(workload, hardware, layout, limits)
    yield from _context(workload, layout)
    if layout.pp > workload.sizes.num_layers:
        yield Refusal("pp", f"pp = {layout.pp} needs as many layers, there are {workload.sizes.num_layers}")
    yield from _experts(workload, layout)
    if layout.data_ranks > workload.global_batch_size:
        why = f"{layout.data_ranks} data ranks for a batch of {workload.global_batch_size} sequences: the rest would compute nothing"
        yield Refusal("batch", why)


def _tensor(workload: Workload, hardware: Accelerator, layout: Layout, limits: Limits) -> Iterator[Refusal]:
    sizes, tp = workload.sizes, layout.tp
    if tp == 1:
        return
    if tp > hardware.devices_per_node and not limits.tp_beyond_node:
        yield Refusal("node", f"tp = {tp} leaves the node of {hardware.devices_per_node}, and talks inside every layer")
    named = {"heads": sizes.num_heads, "key heads": sizes.num_kv_heads, "d_ff": sizes.d_ff, "the vocabulary": sizes.vocab_size}
    for name, size in named.items():
        if size % tp:
            yield Refusal("tp", f"tp = {tp} does not divide {name}: {size}")
    if workload.seq_len % layout.cp == 0 and workload.seq_len // layout.cp % tp:
        yield Refusal("tp", f"tp = {tp} does not divide the {workload.seq_len // layout.cp} positions of a rank")


def _context(workload: Workload, layout: Layout) -> Iterator[Refusal]:
    cp, seq_len = layout.cp, workload.seq_len
    if cp == 1:
        return
    if seq_len % (2 * cp):
        yield Refusal("cp", f"cp = {cp} does not cut a sequence of {seq_len} into two equal pieces for each rank")
    elif seq_len // cp < MIN_POSITIONS:
        yield Refusal("cp", f"cp = {cp} leaves {seq_len // cp} positions for a rank, fewer than {MIN_POSITIONS}")


def _experts(workload: Workload, layout: Layout) -> Iterator[Refusal]:
    if layout.ep == 1:
        return
    if not workload.sizes.num_experts:
        yield Refusal("ep", f"ep = {layout.ep}, but the model has no experts")
    elif workload.sizes.num_experts % layout.ep:
        yield Refusal("ep", f"ep = {layout.ep} does not divide {workload.sizes.num_experts} experts")
    if layout.data_ranks % layout.ep:
        yield Refusal("ep", f"ep = {layout.ep} does not divide {layout.data_ranks} data ranks (dp_shard * dp_replicate)")


def schedule_refusals(workload: Workload, layout: Layout) -> Iterator[Refusal]:
    """What the schedule and its pieces decide."""
    pp, chunks, schedule = layout.pp, layout.pp_chunks, layout.pp_schedule
    if pp == 1:
        return
    if schedule == "1f1b" and chunks != 1:
        yield Refusal("schedule", f"1f1b has one piece on each stage, not {chunks}")
    if schedule != "1f1b" and chunks < 2:
        yield Refusal("schedule", f"{schedule} needs at least 2 pieces on each stage")
    if pp * chunks > workload.sizes.num_layers >= pp:
        yield Refusal("pp", f"pp = {pp} with {chunks} pieces each needs {pp * chunks} layers, there are {workload.sizes.num_layers}")
    if schedule == "zero_bubble" and layout.recompute != "none":
        yield Refusal(
            "schedule", f'zero_bubble goes through a block several times: recompute = "{layout.recompute}" would be paid each time'
        )


def idle_share(layout: Layout, *, num_asked: int, num_micro_batches: int) -> float:
    """Of the whole step. `num_asked` of the `num_micro_batches` are real; what the schedule is filled up with computes nothing."""
    if layout.pp == 1:
        return 0.0
    full = closed_form(layout.pp, num_micro_batches=num_micro_batches, chunks=layout.pp_chunks, schedule=layout.pp_schedule)
    return 1.0 - (1.0 - full.idle_of_total) * num_asked / num_micro_batches


def bubble_refusal(layout: Layout, *, num_asked: int, num_micro_batches: int, max_bubble: float) -> Refusal | None:
    """Where more than `max_bubble` of the step is idle, with the fewest micro-batches that would do."""
    idle = idle_share(layout, num_asked=num_asked, num_micro_batches=num_micro_batches)
    if idle <= max_bubble + 1e-12:
        return None
    fewest = fewest_micro_batches(layout.pp, max_bubble=max_bubble, chunks=layout.pp_chunks, schedule=layout.pp_schedule)
    why = f"{num_asked} micro-batches over pp = {layout.pp} idle {idle:.0%}, more than {max_bubble:.0%}: it takes {fewest}"
    return Refusal("bubble", why)
