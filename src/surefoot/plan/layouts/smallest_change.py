"""What to do where a layout cannot be run, or none can: the nearest that can, found by trying, the smallest change first. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import product
from typing import Any, Literal

from surefoot.core.errors import PlanInfeasible
from surefoot.core.units import show_bytes
from surefoot.plan.hardware import ACCELERATORS, Accelerator
from surefoot.plan.layouts.calibration import Calibration
from surefoot.plan.layouts.judge import Estimate, Judged, idle_of, judge, step_model
from surefoot.plan.layouts.layout_text import show_layout
from surefoot.plan.layouts.legality import DEFAULT_LIMITS, Limits
from surefoot.plan.layouts.search import RECOMPUTES, Ranked, divisors, rank
from surefoot.plan.memory.implementations import SUREFOOT, Implementation
from surefoot.plan.records import Layout, Workload

AXES = ("tp", "cp", "pp", "ep", "dp_shard", "dp_replicate")

MAX_GROWTH = 64
"""Times the devices and the batch, and parts of the sequence, that are tried."""

LARGEST_AXIS = 64
"""Of tp, cp, pp and ep, among those that are tried."""

ANY_BUBBLE = 0.9


@dataclass(frozen=True, slots=True)
class Change:
    """`kind`: setting, layout, batch, bubble, node, sequence, devices, card. `what` in words; `judged` can be run."""

    kind: str
    what: str
    judged: Judged

    def as_dict(self) -> dict[str, object]:
        return {"kind": self.kind, "change": self.what, "layout": self.judged.as_dict()}


@dataclass(frozen=True)
class _Asked:
    workload: Workload
    hardware: Accelerator
    calibration: Calibration | None
    limits: Limits
    implementation: Implementation
    memory: Estimate | None

    def judge(self, layout: Layout) -> Judged:
        return judge(
            self.workload,
            self.hardware,
            layout,
            calibration=self.calibration,
            limits=self.limits,
            implementation=self.implementation,
            memory=self.memory,
            play=False,
        )

    def tried(self, layout: Layout) -> Judged | None:
        """None where it cannot even be timed."""
        try:
            return self.judge(layout)
        except PlanInfeasible:
            return None

    def best(self, num_devices: int) -> Judged | None:
        found = self.rank(num_devices, num_ranked=1).layouts
        return found[0] if found else None

    def idle_share(self, layout: Layout) -> float:
        return idle_of(step_model(self.workload, self.hardware, self.calibration, self.implementation), layout)

    def rank(self, num_devices: int, *, num_ranked: int) -> Ranked:
        return rank(
            self.workload,
            self.hardware,
            num_devices,
            calibration=self.calibration,
            limits=self.limits,
            num_ranked=num_ranked,
            implementation=self.implementation,
            memory=self.memory,
        )


def smallest_change(
    workload: Workload,
    hardware: Accelerator,
    num_devices: int,
    *,
    layout: Layout | None = None,
    calibration: Calibration | None = None,
    limits: Limits = DEFAULT_LIMITS,
    implementation: Implementation = SUREFOOT,
    memory: Estimate | None = None,
) -> tuple[Change, ...]:
    """The smallest change of each kind that there is, the kinds in the order of how much they change.

    For a `layout`: one that differs in the fewest settings, then in one axis, then another one of as many devices. For none, or where
    that is not to be had: a larger batch, a larger bubble, tp beyond a node, shorter sequences at the same tokens, more devices, a larger
    card. A batch is offered where it has fewer sequences than some data ranks or leaves pipelines empty. Empty where nothing helps.
    """
    asked = _Asked(workload, hardware, calibration, limits, implementation, memory)
    if layout is not None:
        near = _near_settings(asked, layout) or _near_axis(asked, layout) or _near_layout(asked, layout)
        if near is not None:
            return (near,)
    return tuple(_wider(asked, num_devices))


def _near_settings(asked: _Asked, layout: Layout) -> Change | None:
    """The axes as they are. Among equally few changed settings the fastest."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < layout.micro_batch_size]
    schedules: list[tuple[Any, int]] = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)] if layout.pp > 1 else []
    candidates = [
        replace(layout, recompute=recompute, micro_batch_size=size, zero_stage=stage, pp_schedule=schedule, pp_chunks=chunks)
        for recompute, size, stage, (schedule, chunks) in product(
            RECOMPUTES, [layout.micro_batch_size, *sizes], (1, 2, 3), [(layout.pp_schedule, layout.pp_chunks), *schedules]
        )
    ]
    by_changes = sorted({one for one in candidates if one != layout}, key=lambda one: (len(_changed(one, layout)), show_layout(one)))
    best: Judged | None = None
    for one in by_changes:
        if best is not None and len(_changed(one, layout)) > len(_changed(best.layout, layout)):
            break
        judged = asked.tried(one)
        if judged is not None and judged.legal and (best is None or judged.step_s < best.step_s):
            best = judged
    return Change("setting", _words(best.layout, layout), best) if best is not None else None


def _near_axis(asked: _Asked, layout: Layout) -> Change | None:
    """One axis by the smallest factor, the data ranks making up for it; if that is not enough, ZeRO and recomputation too. A bubble that
    the person asked for is theirs."""
    axes = [one for axis in ("ep", "tp", "cp", "pp") for one in _with_another(layout, axis)]
    for tried in (axes, [again for one in axes for again in _restated(one)]):
        judged = [asked.tried(one) for one in tried]
        fitting = [one for one in judged if one is not None and all(refusal.kind == "bubble" for refusal in one.refusals)]
        if fitting:
            best = min(fitting, key=lambda one: (len(_changed(one.layout, layout)), _distance(one.layout, layout), one.step_s))
            return Change("layout", _words(best.layout, layout), best)
    return None


def _with_another(layout: Layout, axis: str) -> Iterator[Layout]:
    now, of_a_replica = getattr(layout, axis), layout.num_devices // layout.data_ranks
    for size in divisors(layout.num_devices):
        replica = of_a_replica if axis == "ep" else of_a_replica // now * size
        if size == now or size > LARGEST_AXIS or layout.num_devices % replica:
            continue
        data_ranks = layout.num_devices // replica
        replicate = layout.dp_replicate if data_ranks % layout.dp_replicate == 0 else 1
        changed: dict[str, Any] = {axis: size, "dp_shard": data_ranks // replicate, "dp_replicate": replicate}
        yield replace(layout, **changed)


def _restated(layout: Layout) -> list[Layout]:
    stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    return [replace(layout, recompute=recompute, zero_stage=stage) for recompute, stage in product(RECOMPUTES, stages)]


def _near_layout(asked: _Asked, layout: Layout) -> Change | None:
    """Of as many devices: the fewest axes changed, and those by the smallest factor."""
    found = asked.rank(layout.num_devices, num_ranked=200).layouts
    best = min(found, key=lambda judged: (_distance(judged.layout, layout), judged.step_s), default=None)
    return Change("layout", _words(best.layout, layout), best) if best is not None else None


def _distance(one: Layout, other: Layout) -> tuple[int, Fraction]:
    factor = Fraction(1)
    for axis in AXES:
        small, large = sorted((getattr(one, axis), getattr(other, axis)))
        factor *= Fraction(large, small)
    return sum(getattr(one, axis) != getattr(other, axis) for axis in AXES), factor


def _changed(one: Layout, other: Layout) -> list[str]:
    return [field.name for field in fields(Layout) if getattr(one, field.name) != getattr(other, field.name)]


def _words(one: Layout, other: Layout) -> str:
    return ", ".join(f"{name} {getattr(other, name)} -> {getattr(one, name)}" for name in _changed(one, other))


def _wider(asked: _Asked, num_devices: int) -> Iterator[Change]:
    limits, work = asked.limits, asked.workload
    yield from _larger_batch(asked, num_devices)
    if found := replace(asked, limits=replace(limits, max_bubble=ANY_BUBBLE)).best(num_devices):
        percent = math.ceil(100.0 * asked.idle_share(found.layout))  # a bound that lets it in
        yield Change("bubble", f"a bubble of {percent}% instead of {limits.max_bubble:.0%}", found)
    if not limits.tp_beyond_node and (found := replace(asked, limits=replace(limits, tp_beyond_node=True)).best(num_devices)):
        yield Change("node", f"tp = {found.layout.tp}, beyond a node of {asked.hardware.devices_per_node}", found)
    for parts in _powers():
        if work.seq_len % parts == 0:
            shorter = replace(work, seq_len=work.seq_len // parts, global_batch_size=work.global_batch_size * parts)
            if found := replace(asked, workload=shorter).best(num_devices):
                yield Change("sequence", f"sequences of {shorter.seq_len} instead of {work.seq_len}, as many tokens a step", found)
                break
    for times in _powers():
        if found := asked.best(num_devices * times):
            yield Change("devices", f"{num_devices * times} devices instead of {num_devices}", found)
            break
    for card in sorted(ACCELERATORS.values(), key=lambda one: one.memory_bytes):
        larger = card.memory_bytes > asked.hardware.memory_bytes and asked.hardware.peaks.keys() & card.peaks.keys()
        if larger and (found := replace(asked, hardware=card).best(num_devices)):
            yield Change("card", f"{card.name} with {show_bytes(card.memory_bytes)} instead of {asked.hardware.name}", found)
            break


def _larger_batch(asked: _Asked, num_devices: int) -> Iterator[Change]:
    """Numbers that some data ranks divide; then twice as many, and so on."""
    batch, rejected = asked.workload.global_batch_size, asked.rank(num_devices, num_ranked=1).counts.rejected
    if not rejected.keys() & {"batch", "bubble"}:
        return
    sizes = [*(size for size in divisors(num_devices) if size > batch), *(max(batch, num_devices) * times for times in _powers())]
    for size in sizes:
        if found := replace(asked, workload=replace(asked.workload, global_batch_size=size)).best(num_devices):
            yield Change("batch", f"a batch of {size} sequences instead of {batch}", found)
            return


def _powers() -> Iterator[int]:
    times = 2
    while times <= MAX_GROWTH:
        yield times
        times *= 2
