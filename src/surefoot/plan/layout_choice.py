"""Which layout a plan goes by: the given one, completed, or the simplest of the fastest; and what to do where none can be run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.plan.hardware import Accelerator
from surefoot.plan.layouts import search
from surefoot.plan.layouts.calibration import Calibration
from surefoot.plan.layouts.judge import Judged, judge
from surefoot.plan.layouts.layout_text import completions, parse_layout, said_in, show_layout
from surefoot.plan.layouts.legality import Limits
from surefoot.plan.layouts.recipe import recipe_layout
from surefoot.plan.layouts.smallest_change import smallest_change
from surefoot.plan.memory.implementations import SUREFOOT, SUREFOOT_BF16, SUREFOOT_ON_CPU, Implementation
from surefoot.plan.records import FP32, Dtypes, Layout, Workload
from surefoot.plan.request import Request

RECIPE = "recipe"
"""As a layout: the textbook's."""

MOST_IDLE = 0.1
"""Share of the devices that a given layout may leave out."""

SPARES_FROM_NODES = 16
"""On fewer, a node held in reserve costs more than the failures that it shortens."""

EVEN, LARGEST_PRIME, MOST_FOR_EVENNESS = 4, 31, 0.05
"""Nodes are left idle, up to this share, until their number halves twice and has no larger prime factor: an axis would have to be a
multiple of it, and data ranks beyond the batch stand idle."""

AS_FAST = 0.03
"""Relative difference of step times that says nothing: the model of throughput is off by more. The simpler layout is taken."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What stays the same while model and batch are being settled. `text` is the layout that was given, empty for a search."""

    hardware: Accelerator
    num_devices: int
    scale: Calibration
    limits: Limits
    program: Implementation
    text: str

    def judge(self, work: Workload, layout: Layout, *, play: bool = True) -> Judged:
        """`play`: its schedule too, which takes some hundredths of a second."""
        return judge(work, self.hardware, layout, calibration=self.scale, limits=self.limits, implementation=self.program, play=play)

    def tried(self, work: Workload, layout: Layout) -> Judged | None:
        """None where it cannot even be timed: a model of fewer layers, for one."""
        with suppress(PlanInfeasible):
            return self.judge(work, layout)
        return None

    def rank(self, work: Workload) -> search.Ranked:
        return search.rank(work, self.hardware, self.num_devices, calibration=self.scale, limits=self.limits, implementation=self.program)

    def textbook(self, work: Workload) -> Judged | None:
        """None where the textbook has no answer."""
        try:
            found = recipe_layout(
                work, self.hardware, self.num_devices, calibration=self.scale, limits=self.limits, implementation=self.program
            )
        except PlanInfeasible:
            return None
        return self.judge(work, found.layout)


def asked_by(request: Request, *, num_devices: int, scale: Calibration) -> Asked:
    hardware = request.cluster.accelerator
    return Asked(hardware, num_devices, scale, Limits(max_bubble=request.max_bubble), program_of(hardware), request.layout)


def program_of(hardware: Accelerator) -> Implementation:
    return SUREFOOT_ON_CPU if hardware.name == "cpu" else SUREFOOT


def dtypes_of(dtype: str) -> Dtypes:
    """How surefoot keeps its state: float32, with products in bf16 where that is asked."""
    return FP32 if dtype == "fp32" else SUREFOOT_BF16


def devices_used(request: Request, *, mean_in_repair: float) -> int:
    """Whole nodes, less those in repair on average: a run that lacks a node shrinks, so more would cost more than they save.

    Fewer still where the number is odd or has a large prime factor. A layout that is given uses what it comes to. A power of two stays
    whole: no smaller number can be cut as well.
    """
    num_devices, per_node = request.cluster.num_devices or 1, request.cluster.accelerator.devices_per_node
    nodes = num_devices // per_node
    if request.layout and request.layout != RECIPE:
        return _used_by(request.layout, num_devices)
    if nodes < SPARES_FROM_NODES or num_devices & (num_devices - 1) == 0:
        return num_devices
    most = max(1, nodes - max(1, round(mean_in_repair)))
    fewest = math.ceil((1.0 - MOST_FOR_EVENNESS) * most)
    return next((count for count in range(most, fewest - 1, -1) if _is_even(count)), most) * per_node


def _is_even(count: int) -> bool:
    return count % EVEN == 0 and _largest_prime(count) <= LARGEST_PRIME


def _largest_prime(number: int) -> int:
    """Of its factors; 1 for 1."""
    largest, divisor = 1, 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            largest, number = divisor, number // divisor
        divisor += 1
    return max(largest, number)


def choose_layout(asked: Asked, work: Workload) -> tuple[search.Ranked, Judged]:
    """All that were ranked, and the one to go by. Raises PlanInfeasible with the smallest change that can be run."""
    ranked = asked.rank(work)
    return ranked, _given(asked, work) if asked.text else _best(asked, work, ranked)


def _used_by(layout: str, num_devices: int) -> int:
    """All devices, or the most that its axes come to, where that leaves few idle. Raises ConfigError else."""
    for number in range(num_devices, math.floor((1.0 - MOST_IDLE) * num_devices), -1):
        with suppress(ConfigError):
            parse_layout(layout, num_devices=number)
            return number
    parse_layout(layout, num_devices=num_devices)
    return num_devices


def _given(asked: Asked, work: Workload) -> Judged:
    """What is not said of ZeRO and recomputation is chosen. A bubble above the bound is the person's own wish."""
    if asked.text == RECIPE:
        standard = asked.textbook(work)
        if standard is None:
            raise _cannot(asked, work, None, ["the textbook's layout fits with no number of stages"])
        return standard
    told = parse_layout(asked.text, num_devices=asked.num_devices)
    try:
        variants = [asked.judge(work, one, play=False) for one in completions(told, said=said_in(asked.text))]
    except PlanInfeasible as error:
        raise _cannot(asked, work, told, [error.what]) from error
    fitting = [one for one in variants if can_be_run(one)]
    if not fitting:
        raise _cannot(asked, work, told, [refusal.why for refusal in variants[0].refusals])
    return min(fitting, key=lambda one: one.step_s)


def can_be_run(judged: Judged) -> bool:
    """Whatever its bubble."""
    return all(refusal.kind == "bubble" for refusal in judged.refusals)


def _best(asked: Asked, work: Workload, ranked: search.Ranked) -> Judged:
    """The simplest of those that are as good as the fastest that surefoot can train; the fastest of all where it can train none."""
    if not ranked.layouts:
        raise _cannot(asked, work, None, [ranked.why])
    trained = [one for one in ranked.layouts if one.trainable]
    close = [one for one in trained if one.step_s <= (1.0 + AS_FAST) * trained[0].step_s]
    return min(close, key=lambda one: search.simplicity(one.layout)) if close else ranked.layouts[0]


def _cannot(asked: Asked, work: Workload, layout: Layout | None, why: Sequence[str]) -> PlanInfeasible:
    changes = smallest_change(
        work,
        asked.hardware,
        asked.num_devices,
        layout=layout,
        calibration=asked.scale,
        limits=asked.limits,
        implementation=asked.program,
    )
    what = f"{show_layout(layout)} cannot be run" if layout else f"no layout of {asked.num_devices} {asked.hardware.name} can be run"
    told = "; or ".join(f"{change.what} ({show_layout(change.judged.layout)})" for change in changes[:3])
    hint = f"the smallest change that fits: {told}" if told else "nothing near it fits either: take more devices, or a smaller model"
    return PlanInfeasible(f"{what}: {'; '.join(why)}", where="layout", hint=hint)
