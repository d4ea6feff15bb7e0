"""One layout, judged: whether it can be run, whether it fits, how long a step takes, and what surefoot itself can train of it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from surefoot.core.units import show_bytes
from surefoot.plan.hardware import Accelerator
from surefoot.plan.layouts.calibration import DEFAULT, Calibration
from surefoot.plan.layouts.communication import is_surefoot
from surefoot.plan.layouts.legality import DEFAULT_LIMITS, Limits, Refusal, axes_refusals, bubble_refusal, idle_share, schedule_refusals
from surefoot.plan.layouts.pipeline_schedule import Bubble, closed_form
from surefoot.plan.layouts.pipeline_timeline import NUM_ROUNDS_PLAYED, Timeline, play_out
from surefoot.plan.layouts.throughput import StepModel, StepTime
from surefoot.plan.memory import estimate as device_memory
from surefoot.plan.memory.estimate import Memory
from surefoot.plan.memory.implementations import IMPLEMENTATIONS, SUREFOOT, Implementation
from surefoot.plan.records import Layout, Workload

Estimate = Callable[[Workload, Layout], Memory]

MAX_OPS_PLAYED = 60_000
"""Of a schedule: beyond, a tenth of a second and more would go into a figure that the closed form gives to a few per cent."""


@dataclass(frozen=True, slots=True)
class PipelineTold:
    """The closed form of equal stages, and the schedule played out with the stages as they are: None where that would take long."""

    closed: Bubble
    played: Timeline | None

    def as_dict(self) -> dict[str, object]:
        told: dict[str, object] = {"idle_of_ideal": self.closed.idle_of_ideal, "idle_of_total": self.closed.idle_of_total}
        if self.played is not None:
            told |= {"simulated_idle_of_ideal": self.played.idle_of_ideal, "simulated_idle_of_total": self.played.idle_of_total}
            told["peak_in_flight"] = list(self.played.peak_in_flight)
        return told


@dataclass(frozen=True, slots=True)
class Judged:
    """`refusals`: why it cannot be run as asked, empty where it can. `waste`: share of the step that phantoms fill up. `untrainable`: why
    surefoot cannot train it today though it is legal, "" where it can.
    """

    layout: Layout
    memory: Memory
    step: StepTime
    bubble: PipelineTold
    mfu: float
    tokens_per_s: float
    waste: float
    refusals: tuple[Refusal, ...] = ()
    untrainable: str = ""

    @property
    def step_s(self) -> float:
        return self.step.total_s

    @property
    def fits(self) -> bool:
        return not any(refusal.kind == "memory" for refusal in self.refusals)

    @property
    def legal(self) -> bool:
        return not self.refusals

    @property
    def trainable(self) -> bool:
        return self.legal and not self.untrainable

    def as_dict(self) -> dict[str, object]:
        return {
            **asdict(self.layout),
            "num_devices": self.layout.num_devices,
            "memory": self.memory.as_dict(),
            "bubble": self.bubble.as_dict(),
            "mfu": self.mfu,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "time": self.step.as_dict(),
            "num_micro_batches": self.step.num_micro_batches,
            "waste": self.waste,
            "fits": self.fits,
            "trainable": self.trainable,
            "untrainable": self.untrainable,
            "refusals": [{"kind": refusal.kind, "reason": refusal.why} for refusal in self.refusals],
        }


def judge(
    workload: Workload,
    hardware: Accelerator,
    layout: Layout,
    *,
    calibration: Calibration | None = None,
    limits: Limits = DEFAULT_LIMITS,
    implementation: Implementation = SUREFOOT,
    memory: Estimate | None = None,
    dtype: str = "",
    play: bool = True,
) -> Judged:
    """The record of a given layout. One that cannot be run is told with its refusals; where no time can be given, PlanInfeasible."""
    model = step_model(workload, hardware, calibration, implementation, dtype)
    estimate = memory or estimate_of(implementation)
    refusals = [*axes_refusals(workload, hardware, layout, limits), *schedule_refusals(workload, layout)]
    refusals += filter(None, [bubble_of(model, layout, limits)])
    told = estimate(workload, layout)
    refusals += filter(None, [memory_refusal(told, hardware, limits)])
    return record(model, layout, told, refusals=tuple(refusals), play=play)


def record(model: StepModel, layout: Layout, told: Memory, *, refusals: tuple[Refusal, ...] = (), play: bool = True) -> Judged:
    """With what is known already."""
    step = model.step(layout)
    work = model.workload
    bubble = _bubble(model, layout, step.num_micro_batches, play=play)
    if bubble.played is not None:
        step = _as_played(step, bubble.played)
    filled = step.num_micro_batches * layout.micro_batch_size * layout.data_ranks
    return Judged(
        layout=layout,
        memory=told,
        step=step,
        bubble=bubble,
        mfu=model.mfu(step.total_s, layout.num_devices),
        tokens_per_s=work.tokens_per_step / step.total_s,
        waste=1.0 - work.global_batch_size / filled,
        refusals=refusals,
        untrainable=untrainable(work, layout),
    )


def step_model(
    workload: Workload, hardware: Accelerator, calibration: Calibration | None, implementation: Implementation, dtype: str = ""
) -> StepModel:
    """A measured calibration is that of the program that was measured. `dtype` of the products: bf16 where activations have two bytes."""
    calibration = calibration or DEFAULT
    measured = IMPLEMENTATIONS.get(calibration.program, implementation) if calibration.is_measured else implementation
    runs = implementation if is_surefoot(measured) else measured
    return StepModel(workload, hardware, calibration, runs, dtype or _dtype(workload, hardware))


def _dtype(workload: Workload, hardware: Accelerator) -> str:
    if workload.dtypes.activation > 2:
        return "fp32"
    return "fp16" if "bf16" not in hardware.peaks and "fp16" in hardware.peaks else "bf16"


def bubble_of(model: StepModel, layout: Layout, limits: Limits) -> Refusal | None:
    asked, run = model.num_asked(layout), model.num_micro_batches(layout)
    return bubble_refusal(layout, num_asked=asked, num_micro_batches=run, max_bubble=limits.max_bubble)


def idle_of(model: StepModel, layout: Layout) -> float:
    """What `bubble_of` asks about."""
    return idle_share(layout, num_asked=model.num_asked(layout), num_micro_batches=model.num_micro_batches(layout))


def estimate_of(implementation: Implementation) -> Estimate:
    return lambda workload, layout: device_memory.estimate(workload, layout, implementation=implementation)


def memory_refusal(told: Memory, hardware: Accelerator, limits: Limits) -> Refusal | None:
    if device_memory.fits(told, hardware.memory_bytes, margin=limits.margin):
        return None
    has, needs = show_bytes(hardware.memory_bytes), show_bytes(told.total)
    return Refusal("memory", f"needs {needs} and {limits.margin:.0%} to spare, {hardware.name} has {has}: {_largest(told)}")


def _largest(told: Memory) -> str:
    """The two terms that weigh most."""
    terms = sorted(((value, name) for name, value, _ in device_memory.told(told)), reverse=True)[:2]
    return " and ".join(f"{name} {show_bytes(value)}" for value, name in terms)


def _bubble(model: StepModel, layout: Layout, number: int, *, play: bool) -> PipelineTold:
    closed = closed_form(layout.pp, num_micro_batches=number, chunks=layout.pp_chunks, schedule=layout.pp_schedule)
    num_played = number if number % layout.pp else min(number, NUM_ROUNDS_PLAYED * layout.pp)
    if layout.pp == 1 or not play or 3 * layout.pp * layout.pp_chunks * num_played > MAX_OPS_PLAYED:
        return PipelineTold(closed, None)
    played = play_out(
        model.pieces(layout),
        pp=layout.pp,
        num_micro_batches=number,
        schedule=layout.pp_schedule,
        p2p_s=model.passing_of_one_s(layout),
    )
    return PipelineTold(closed, played)


def _as_played(step: StepTime, played: Timeline) -> StepTime:
    """The idle time of the slowest stage, as the schedule gives it: stages are not equal."""
    inside = step.compute_s + step.tensor_s + step.context_s + step.expert_s + step.passing_s
    return replace(step, bubble_s=max(0.0, played.total_s - inside))


def untrainable(workload: Workload, layout: Layout) -> str:
    """What surefoot plans and does not train in this release."""
    if layout.ep > 1:
        return "ep is planned, not trained, in this release"
    if workload.sizes.num_experts:
        return "experts are planned, not trained, in this release"
    return ""
