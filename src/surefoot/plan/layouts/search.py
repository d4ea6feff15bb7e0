"""Every layout of a number of devices, ranked by the time of a step; each that is not ranked with its reason. Pure.

Exhaustive, but nothing is computed twice, and what cannot be among the fastest is not computed to the end: a layout's time without data
parallel traffic and update is a lower bound for all ways to share its data ranks out, and its fully sharded form needs the least memory.
What is left is played out, schedule by schedule, and sorted by that.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple

from surefoot.core.errors import PlanInfeasible
from surefoot.plan.hardware import Accelerator
from surefoot.plan.layouts.calibration import Calibration
from surefoot.plan.layouts.judge import Estimate, Judged, bubble_of, estimate_of, memory_refusal, record, step_model
from surefoot.plan.layouts.layout_text import show_layout
from surefoot.plan.layouts.legality import DEFAULT_LIMITS, Limits, Refusal, axes_refusals, schedule_refusals
from surefoot.plan.layouts.throughput import StepModel
from surefoot.plan.memory.implementations import SUREFOOT, Implementation
from surefoot.plan.records import Layout, PipelineSchedule, Recompute, Workload

NUM_RANKED = 20
PER_AXES = 2
"""Of one tp, cp, pp and ep: else the list were twenty ways to share the same data ranks out."""

EXAMPLES_PER_KIND = 4

MAX_CP = 64
MAX_TP = 64
"""Beyond, an axis is not even told as rejected: no published run has come near."""

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Rejected:
    layout: Layout
    kind: str
    reason: str

    def as_dict(self) -> dict[str, object]:
        return {"layout": show_layout(self.layout), "kind": self.kind, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Counts:
    """How many layouts: `considered` in all; of them `ranked` fit and were timed, `slower` have a bound above the slowest that is told, and
    the rest were rejected, by kind. Where axes alone are illegal, all ways to fill them in count as one.
    """

    considered: int
    ranked: int
    slower: int
    rejected: dict[str, int]


@dataclass(frozen=True, slots=True)
class Ranked:
    """`layouts`, the fastest first. `rejected` has a few examples of each kind, `counts` all of them. `why`: what is most in the way."""

    layouts: tuple[Judged, ...]
    rejected: tuple[Rejected, ...]
    counts: Counts
    why: str = ""

    def as_dict(self) -> dict[str, object]:
        return {
            "layouts": [judged.as_dict() for judged in self.layouts],
            "rejected": [one.as_dict() for one in self.rejected],
            "counts": asdict(self.counts),
        }

    @property
    def best(self) -> Judged:
        """Raises PlanInfeasible where nothing can be run."""
        if not self.layouts:
            hint = "take a larger batch, more devices, a larger card or a smaller model"
            raise PlanInfeasible(f"none of {self.counts.considered} layouts can be run: {self.why}", where="layout", hint=hint)
        return self.layouts[0]


@dataclass(slots=True)
class _Tally:
    """Of rejections: a number for each kind, and the first few with as many different reasons as there are."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, dict[str, Rejected]] = field(default_factory=dict)

    def add(self, layout: Layout, refusal: Refusal, *, number: int = 1) -> None:
        self.counts[refusal.kind] += number
        kept = self.examples.setdefault(refusal.kind, {})
        if len(kept) < EXAMPLES_PER_KIND:
            kept.setdefault(refusal.why, Rejected(layout, refusal.kind, refusal.why))

    def told(self) -> tuple[Rejected, ...]:
        return tuple(one for kept in self.examples.values() for one in kept.values())

    def commonest(self) -> str:
        """The reason of the kind that most were rejected for; axes that are illegal say less than how far the legal ones came."""
        kinds = [kind for kind in ("memory", "bubble") if kind in self.counts] or list(self.counts)
        most = max(kinds, key=self.counts.__getitem__, default="")
        return next((one.reason for one in self.examples.get(most, {}).values()), "there are none")


def rank(
    workload: Workload,
    hardware: Accelerator,
    num_devices: int,
    *,
    calibration: Calibration | None = None,
    limits: Limits = DEFAULT_LIMITS,
    max_bubble: float | None = None,
    num_ranked: int = NUM_RANKED,
    per_axes: int = PER_AXES,
    implementation: Implementation = SUREFOOT,
    memory: Estimate | None = None,
    dtype: str = "",
    prune: bool = True,
) -> Ranked:
    """The `num_ranked` fastest, at most `per_axes` of one tp, cp, pp and ep. Equal times: fewer axes first.

    `prune` False computes everything to the end, for tests.
    """
    limits = limits if max_bubble is None else replace(limits, max_bubble=max_bubble)
    model = step_model(workload, hardware, calibration, implementation, dtype)
    return _Search(model, limits, memory or estimate_of(implementation), num_ranked, per_axes, prune).run(num_devices)


class _Timed(NamedTuple):
    step_s: float
    simplicity: tuple[int, ...]
    layout: Layout


@dataclass(slots=True)
class _Search:
    model: StepModel
    limits: Limits
    memory: Estimate
    num_ranked: int
    per_axes: int
    prune: bool
    tally: _Tally = field(default_factory=_Tally)
    considered: int = 0
    num_axes: int = 0  # legal ones
    ranked: int = 0
    slower: int = 0
    best: dict[tuple[int, ...], list[_Timed]] = field(default_factory=dict)
    slowest_s: float = math.inf

    def run(self, num_devices: int) -> Ranked:
        """Layouts are taken in the order of their lower bounds; from the first one that cannot be among the best on, all are slower."""
        bounded = sorted(self._bounded(num_devices), key=lambda found: found[0])
        for index, (bound_s, layout, ways) in enumerate(bounded):
            if self.prune and bound_s > self.slowest_s:
                self.slower += sum(num for _, _, num in bounded[index:])
                break
            own = self.best.get(_axes(layout), [])
            if self.prune and len(own) == self.per_axes and bound_s > own[-1].step_s:
                self.slower += ways
                continue
            self._share_out(layout, ways)
        layouts = tuple(sorted((self._record(found.layout) for found in self._fastest()), key=lambda judged: judged.step_s))
        counts = Counts(self.considered, self.ranked, self.slower, dict(self.tally.counts))
        return Ranked(layouts, self.tally.told(), counts, self._why(num_devices))

    def _why(self, num_devices: int) -> str:
        """The batch, where it has fewer sequences than most axes that are legal otherwise have data ranks."""
        starved, common = self.tally.counts["batch"], self.tally.commonest()
        if starved <= self.num_axes:
            return common
        batch = self.model.workload.global_batch_size
        cut = f"{starved} of {starved + self.num_axes} ways to cut {num_devices} devices"
        return f"the batch of {batch} sequences is too small, {cut} have more data ranks than that; of the rest: {common}"

    def _fastest(self) -> list[_Timed]:
        return sorted((found for own in self.best.values() for found in own), key=lambda kept: kept[:2])[: self.num_ranked]

    def _record(self, layout: Layout) -> Judged:
        return record(self.model, layout, self.memory(self.model.workload, layout))

    def _bounded(self, num_devices: int) -> Iterator[tuple[float, Layout, int]]:
        """(seconds at least, layout fully sharded, ways to share out its data ranks): legal, and its pipeline full enough."""
        for axes in axes_of(num_devices, self.model.workload):
            refusal = next(axes_refusals(self.model.workload, self.model.hardware, axes, self.limits), None)
            if refusal is not None:
                self.considered += 1
                self.tally.add(axes, refusal)
                continue
            self.num_axes += 1
            ways = len(ways_to_share(axes))
            for layout in schedules_of(axes, self.limits):
                sized = [(replace(layout, micro_batch_size=size), RECOMPUTES) for size in micro_batches_of(layout, self.model, self.limits)]
                yield from self._sized(layout, sized, ways)

    def _sized(self, layout: Layout, sized: list[tuple[Layout, tuple[Recompute, ...]]], ways: int) -> Iterator[tuple[float, Layout, int]]:
        """Memory grows with the micro-batch and shrinks with recomputation: where the least of them does not fit, none does."""
        least = replace(layout, recompute="none" if layout.pp_schedule == "zero_bubble" else "full")
        number = len(sized) * (1 if layout.pp_schedule == "zero_bubble" else len(RECOMPUTES)) * ways
        refusal = next(schedule_refusals(self.model.workload, least), None)
        if refusal is None and self.prune:
            refusal = memory_refusal(self.memory(self.model.workload, least), self.model.hardware, self.limits)
        if refusal is not None:
            self.considered += number
            self.tally.add(least, refusal, number=number)
            return
        for with_size, recomputes in sized:
            bubble = bubble_of(self.model, with_size, self.limits)
            for recompute in recomputes:
                one = replace(with_size, recompute=recompute)
                if layout.pp_schedule == "zero_bubble" and recompute != "none":
                    continue
                self.considered += ways
                if bubble is not None:
                    self.tally.add(one, bubble, number=ways)
                else:
                    yield self.model.inner(one).total_s, one, ways

    def _share_out(self, layout: Layout, ways: int) -> None:
        """All ways to share the data ranks out, where at least the one that needs the least memory fits."""
        least = self.memory(self.model.workload, layout)
        refusal = memory_refusal(least, self.model.hardware, self.limits)
        if refusal is not None and self.prune:
            self.tally.add(layout, refusal, number=ways)
            return
        for shard, replicas, stage in ways_to_share(layout):
            one = replace(layout, dp_shard=shard, dp_replicate=replicas, zero_stage=stage)
            refusal = memory_refusal(self.memory(self.model.workload, one), self.model.hardware, self.limits)
            if refusal is not None:
                self.tally.add(one, refusal)
                continue
            self.ranked += 1
            self._keep(one)

    def _keep(self, layout: Layout) -> None:
        found = _Timed(self.model.step(layout).total_s, simplicity(layout), layout)
        own = self.best.setdefault(_axes(layout), [])
        if found.step_s > self.slowest_s or (len(own) == self.per_axes and found[:2] > own[-1][:2]):
            return
        bisect.insort(own, found, key=lambda kept: kept[:2])
        del own[self.per_axes :]
        fastest = self._fastest()
        if len(fastest) == self.num_ranked:
            self.slowest_s = fastest[-1].step_s


def _axes(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.cp, layout.pp, layout.ep


def simplicity(layout: Layout) -> tuple[int, ...]:
    """Smaller is simpler; no two layouts of one search are equal."""
    axes = (layout.pp, layout.tp, layout.cp, layout.ep, layout.dp_replicate)
    words = (("1f1b", "interleaved", "zero_bubble").index(layout.pp_schedule), RECOMPUTES.index(layout.recompute))
    return (sum(size > 1 for size in axes), *axes, layout.pp_chunks, *words, 3 - layout.zero_stage, layout.micro_batch_size)


def axes_of(num_devices: int, workload: Workload) -> Iterator[Layout]:
    """Every tp, cp, pp and ep; data ranks are what is left, fully sharded."""
    for tp in (size for size in divisors(num_devices) if size <= MAX_TP):
        for cp in (size for size in divisors(num_devices // tp) if size <= MAX_CP):
            for pp in (size for size in divisors(num_devices // (tp * cp)) if size <= 2 * workload.sizes.num_layers):
                data_ranks = num_devices // (tp * cp * pp)
                experts = divisors(data_ranks) if workload.sizes.num_experts else (1,)
                for ep in (size for size in experts if size <= max(1, workload.sizes.num_experts)):
                    yield Layout(tp=tp, cp=cp, pp=pp, ep=ep, dp_shard=data_ranks)


def schedules_of(axes: Layout, limits: Limits) -> Iterator[Layout]:
    if axes.pp == 1:
        yield axes
        return
    yield axes
    for chunks in (2, 3, 4, 6, 8):
        if chunks <= limits.max_chunks:
            for schedule in _MANY:
                yield replace(axes, pp_schedule=schedule, pp_chunks=chunks)


_MANY: tuple[PipelineSchedule, ...] = ("interleaved", "zero_bubble")


def micro_batches_of(layout: Layout, model: StepModel, limits: Limits) -> tuple[int, ...]:
    """Powers of two, and what a data rank has of a step in one."""
    share = max(1, model.workload.global_batch_size // layout.data_ranks)
    most = min(share, limits.max_micro_batch_size)
    return tuple(sorted({size for size in (1, 2, 4, 8, 16, 32, 64, share) if size <= most}))


@cache
def divisors(number: int) -> tuple[int, ...]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def ways_to_share(layout: Layout) -> tuple[tuple[int, int, Literal[1, 2, 3]], ...]:
    """(dp_shard, dp_replicate, zero_stage). Ranks that have the same experts must be in one copy. In a pipeline stage 2 acts as 1."""
    return _ways(layout.data_ranks, cp=layout.cp, ep=layout.ep, pipelined=layout.pp > 1)


@cache
def _ways(data_ranks: int, *, cp: int, ep: int, pipelined: bool) -> tuple[tuple[int, int, Literal[1, 2, 3]], ...]:
    all_stages: tuple[Literal[1, 2, 3], ...] = (1, 3) if pipelined else (1, 2, 3)
    whole: tuple[Literal[1, 2, 3], ...] = (3,)
    return tuple(
        (shard, data_ranks // shard, stage)
        for shard in divisors(data_ranks)
        if shard * cp % ep == 0
        for stage in (all_stages if shard * cp > 1 else whole)
    )
