"""From a request to a plan: budget, model, layout, training, saves and failures, in one consistent calculation. Pure.

What failures cost is needed before the model is known, because it shortens the budget, and follows from the model. It is small and moves
slowly, so a first model at full goodput gives it, and the second model is the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.plan.composed import Plan
from surefoot.plan.failures.checkpoint_sizes import saved_bytes
from surefoot.plan.failures.interval import SECONDS_PER_DAY
from surefoot.plan.failures.reasons import reasons_of
from surefoot.plan.failures.reliability import Operation, Reliability, assess
from surefoot.plan.layouts import search
from surefoot.plan.layouts.calibration import DEFAULT, Calibration
from surefoot.plan.layouts.judge import Judged, judge
from surefoot.plan.layouts.layout_text import completions, parse_layout, said_in, show_layout
from surefoot.plan.layouts.legality import Limits
from surefoot.plan.layouts.pipeline_schedule import fewest_micro_batches
from surefoot.plan.layouts.recipe import Recipe, beside, recipe_layout
from surefoot.plan.layouts.smallest_change import smallest_change
from surefoot.plan.memory.implementations import SUREFOOT, SUREFOOT_BF16, SUREFOOT_ON_CPU, Implementation
from surefoot.plan.records import FP32, Dtypes, Layout, Reason, Workload
from surefoot.plan.request import Cluster, Request, check_request
from surefoot.plan.sizing import allocation
from surefoot.plan.sizing.laws import Law
from surefoot.plan.sizing.model_choice import ModelChoice, assumed_mfu, choose_model
from surefoot.plan.surface_record import Surface
from surefoot.plan.tuning.batch import uneven
from surefoot.plan.tuning.training_choice import TrainingChoice, choose_training, wished_batch

RECIPE = "recipe"
"""As a layout: the textbook's."""

MOST_IDLE = 0.1
"""Share of the devices that a given layout may leave out."""

NUM_ROUNDS = 2
"""Of model and layout, which decide each other: the MFU of the layout is that of the budget to a per cent then."""

SPARES_FROM_NODES = 16
"""On fewer, a node held in reserve costs more than the failures that it shortens."""

AS_FAST = 0.03
"""Relative difference of step times that says nothing: the model of throughput is off by more. The simpler layout is taken."""

TIME_DOUBT = 0.02
"""Relative difference between the time that was given and what the steps take, from which on it is said."""

MUCH_ERROR = 0.3
"""Mean relative error of a calibration on its own rows, from which on something is wrong with them."""

SEVERAL_NODES = "several machines: `surefoot train` starts the ranks of one in this release; torchrun starts the same worker on more"

MFU_DOUBT = 0.1
"""Relative difference between the MFU of the budget and that of the layout, from which on it is said."""


def make_plan(request: Request, *, law: Law, calibration: Calibration | None = None, validated: bool = False) -> Plan:
    """Raises ConfigError for what is asked wrongly, PlanInfeasible where nothing satisfies the request, with what would."""
    check_request(request)
    scale = calibration or DEFAULT
    aim, mfu = request.aim, assumed_mfu(request.aim)
    model = choose_model(request.cluster, aim, law=law, goodput=1.0, mfu=mfu)
    request = replace(request, cluster=replace(request.cluster, num_devices=model.budget.num_devices))
    first = assess(_expected(model, request.cluster, mfu))
    _refuse_hopeless(first, request)
    num_used = _used(request, first)
    found = _search(request, model, num_used, scale)
    share = first.goodput.value * num_used / model.budget.num_devices
    for _ in range(NUM_ROUNDS):
        model = choose_model(request.cluster, aim, law=law, goodput=share, mfu=aim.mfu or found.chosen.mfu)
        found, training, work = _settled(request, model, found, num_used, scale)
    found = _told(request, work, found, num_used, scale)
    operation = _operation(request, model, found.chosen, training)
    reliability = assess(operation)
    plan = Plan(
        request=request,
        law=law,
        model=model,
        workload=work,
        training=training,
        layout=found.chosen,
        ranked=found.ranked,
        recipe=found.recipe,
        num_idle=model.budget.num_devices - num_used,
        calibration=scale,
        operation=operation,
        reliability=reliability,
        goodput=first.goodput.value,
        run_s=operation.total_s / max(1e-9, reliability.goodput.value),
        validated=validated,
        warnings=(),
        reasons={},
    )
    return replace(plan, warnings=tuple(_warnings(plan)), reasons=_reasons(plan))


@dataclass(frozen=True, slots=True)
class _Found:
    """`chosen` is the given layout, or the simplest of the fastest."""

    ranked: search.Ranked
    chosen: Judged
    recipe: Recipe | None


def _settled(
    request: Request, model: ModelChoice, found: _Found, num_used: int, scale: Calibration
) -> tuple[_Found, TrainingChoice, Workload]:
    """The chosen layout under the model and the batch that are the plan's; searched anew where it no longer fits."""
    training = _training(request, model, found.chosen.layout)
    work = workload_of(request, model, global_batch_size=training.batch.batch)
    chosen = _judge(request, work, found.chosen.layout, scale)
    if not chosen.fits:
        found = _search(request, model, num_used, scale)
        training = _training(request, model, found.chosen.layout)
        work = workload_of(request, model, global_batch_size=training.batch.batch)
        chosen = _judge(request, work, found.chosen.layout, scale)
    return replace(found, chosen=chosen), training, work


def _told(request: Request, work: Workload, found: _Found, num_used: int, scale: Calibration) -> _Found:
    """The other layouts under the same model and batch as the chosen one."""
    again = (_judge(request, work, one.layout, scale) for one in found.ranked.layouts)
    layouts = tuple(sorted((one for one in again if one.legal), key=lambda one: one.step_s))
    standard = _standard(request, work, num_used, scale)
    return replace(
        found, ranked=replace(found.ranked, layouts=layouts), recipe=beside(standard, layouts[0]) if standard and layouts else None
    )


def _refuse_hopeless(first: Reliability, request: Request) -> None:
    if first.goodput.value > 0:
        return
    mtbf, restart = first.failures.mtbf_s, request.cluster.restart_s
    raise PlanInfeasible(
        f"a failure every {mtbf:.3g} s and {restart:.3g} s for each restart leave no time to train",
        where="reliability",
        hint="fewer devices, a faster restart (--restart-s), or machines that fail less (--failures-per-node-day)",
        got=restart,
        limit=mtbf,
    )


def dtypes_of(dtype: str) -> Dtypes:
    """How surefoot keeps its state: float32, with products in bf16 where that is asked."""
    return FP32 if dtype == "fp32" else SUREFOOT_BF16


def workload_of(request: Request, model: ModelChoice, *, global_batch_size: int) -> Workload:
    return Workload(model.sizes, model.seq_len, global_batch_size, dtypes=dtypes_of(request.cluster.dtype))


def program_of(cluster: Cluster) -> Implementation:
    return SUREFOOT_ON_CPU if cluster.accelerator.name == "cpu" else SUREFOOT


def _expected(model: ModelChoice, cluster: Cluster, mfu: float) -> Operation:
    """Before a layout is known: a step of a tenth of a thousandth of the run, at the MFU of the budget."""
    seconds = model.cost.exact / (model.budget.num_devices * model.budget.peak_flops * mfu)
    return _operated(
        cluster, model, num_devices=model.budget.num_devices, step_s=seconds / 1e4, tokens_per_step=model.tokens / 1e4, total_s=seconds
    )


def _operation(request: Request, model: ModelChoice, judged: Judged, training: TrainingChoice) -> Operation:
    step_s = judged.step_s
    return _operated(
        request.cluster,
        model,
        num_devices=judged.layout.num_devices,
        step_s=step_s,
        tokens_per_step=training.batch.batch * model.seq_len,
        total_s=model.tokens / (training.batch.batch * model.seq_len) * step_s,  # smaller steps of a ramp take less time
    )


def _operated(
    cluster: Cluster, model: ModelChoice, *, num_devices: int, step_s: float, tokens_per_step: float, total_s: float
) -> Operation:
    return Operation(
        hardware=cluster.accelerator,
        num_devices=num_devices,
        state_bytes=saved_bytes(model.sizes.num_parameters, dtypes_of(cluster.dtype)),
        step_s=step_s,
        tokens_per_step=tokens_per_step,
        total_s=total_s,
        failures_per_node_day=cluster.failures_per_node_day,
        stall_s=cluster.stall_s,
        restart_s=cluster.restart_s,
        detection_s=cluster.detection_s,
        price_per_hour=cluster.usd_per_hour,
    )


def _used(request: Request, first: Reliability) -> int:
    """Whole nodes, less those that are in repair on average: a run that lacks a node shrinks, so more would cost more than they save.

    A layout that is given uses what it comes to. A power of two stays whole: no smaller number can be cut as well.
    """
    num_devices, per_node = request.cluster.num_devices or 1, request.cluster.accelerator.devices_per_node
    nodes = num_devices // per_node
    if request.layout and request.layout != RECIPE:
        return _used_by(request.layout, num_devices)
    if nodes < SPARES_FROM_NODES or num_devices & (num_devices - 1) == 0:
        return num_devices
    return (nodes - max(1, round(first.spares.mean_in_repair))) * per_node


def _used_by(layout: str, num_devices: int) -> int:
    """All devices, or the most that its axes come to, where that leaves few idle. Raises ConfigError else."""
    for number in range(num_devices, math.floor((1.0 - MOST_IDLE) * num_devices), -1):
        with suppress(ConfigError):
            parse_layout(layout, num_devices=number)
            return number
    parse_layout(layout, num_devices=num_devices)
    return num_devices


def _search(request: Request, model: ModelChoice, num_used: int, scale: Calibration) -> _Found:
    """All layouts, the one to go by, and the textbook's beside the fastest."""
    work = workload_of(request, model, global_batch_size=_wished(request, model, num_used))
    cluster, limits, program = request.cluster, Limits(max_bubble=request.max_bubble), program_of(request.cluster)
    ranked = search.rank(work, cluster.accelerator, num_used, calibration=scale, limits=limits, implementation=program)
    chosen = _given(request, work, num_used, scale) if request.layout else _best(ranked, work, request, num_used)
    return _Found(ranked, chosen, None)


def _given(request: Request, work: Workload, num_used: int, scale: Calibration) -> Judged:
    """What is not said of ZeRO and recomputation is chosen. A bubble above the bound is the person's own wish."""
    if request.layout == RECIPE:
        standard = _standard(request, work, num_used, scale)
        if standard is None:
            raise _cannot(None, ["the textbook's layout fits with no number of stages"], work, request, num_used)
        return standard
    told = parse_layout(request.layout, num_devices=num_used)
    variants = [_judge(request, work, one, scale, play=False) for one in completions(told, said=said_in(request.layout))]
    fitting = [one for one in variants if all(refusal.kind == "bubble" for refusal in one.refusals)]
    if not fitting:
        raise _cannot(told, [refusal.why for refusal in variants[0].refusals], work, request, num_used)
    return min(fitting, key=lambda one: one.step_s)


def _wished(request: Request, model: ModelChoice, num_used: int) -> int:
    loss = model.frontier.choice.loss
    return request.aim.global_batch_size or wished_batch(
        model.sizes, tokens=model.tokens, loss=loss, seq_len=model.seq_len, num_devices=num_used
    )


def _standard(request: Request, work: Workload, num_used: int, scale: Calibration) -> Judged | None:
    """None where the textbook has no answer."""
    limits, program = Limits(max_bubble=request.max_bubble), program_of(request.cluster)
    try:
        found = recipe_layout(work, request.cluster.accelerator, num_used, calibration=scale, limits=limits, implementation=program)
    except PlanInfeasible:
        return None
    return _judge(request, work, found.layout, scale)


def _best(ranked: search.Ranked, work: Workload, request: Request, num_used: int) -> Judged:
    """The simplest of those that are as good as the fastest that surefoot can train; the fastest of all where it can train none."""
    if not ranked.layouts:
        most = max(ranked.counts.rejected, key=ranked.counts.rejected.__getitem__, default="")
        raise _cannot(None, [one.reason for one in ranked.rejected if one.kind == most][:1], work, request, num_used)
    trained = [one for one in ranked.layouts if one.trainable]
    close = [one for one in trained if one.step_s <= (1.0 + AS_FAST) * trained[0].step_s]
    return min(close, key=lambda one: search.simplicity(one.layout)) if close else ranked.layouts[0]


def _cannot(layout: Layout | None, why: Sequence[str], work: Workload, request: Request, num_used: int) -> PlanInfeasible:
    changes = smallest_change(
        work,
        request.cluster.accelerator,
        num_used,
        layout=layout,
        limits=Limits(max_bubble=request.max_bubble),
        implementation=program_of(request.cluster),
    )
    what = f"{show_layout(layout)} cannot be run" if layout else f"no layout of {num_used} {request.cluster.accelerator.name} can be run"
    told = "; or ".join(f"{change.what} ({show_layout(change.judged.layout)})" for change in changes[:3])
    hint = f"the smallest change that fits: {told}" if told else "nothing near it fits either: take more devices, or a smaller model"
    return PlanInfeasible(f"{what}: {'; '.join(why)}", where="layout", hint=hint)


def _judge(request: Request, work: Workload, layout: Layout, scale: Calibration, *, play: bool = True) -> Judged:
    """With the batch that was made legal for it. `play`: its schedule too, which takes some hundredths of a second."""
    return judge(
        work,
        request.cluster.accelerator,
        layout,
        calibration=scale,
        limits=Limits(max_bubble=request.max_bubble),
        implementation=program_of(request.cluster),
        play=play,
    )


def _training(request: Request, model: ModelChoice, layout: Layout) -> TrainingChoice:
    least = fewest_micro_batches(
        layout.pp, max_bubble=request.max_bubble, chunks=layout.pp_chunks, schedule=layout.pp_schedule, of_stages=layout.pp_chunks > 1
    )
    return choose_training(
        model.sizes,
        tokens=model.tokens,
        loss=model.frontier.choice.loss,
        seq_len=model.seq_len,
        surface=_surface(model),
        data_ranks=(layout.data_ranks,),
        micro_batch_size=layout.micro_batch_size,
        wished=_wished(request, model, layout.num_devices),
        least_micro_batches=least,
        given_batch=request.aim.global_batch_size,
    )


def _surface(model: ModelChoice) -> Surface:
    """The law's own, or the shape that was borrowed for it."""
    return allocation.bowl(model.frontier.law, model.law_flops).surface


def _is_implied(request: Request) -> bool:
    """Whether devices, days and FLOPs are all given, so that the MFU follows."""
    aim = request.aim
    return aim.days is not None and (aim.flops is not None or (aim.n is not None and aim.tokens is not None))


def _time(plan: Plan) -> list[str]:
    """Where the steps do not take the days that were given."""
    days, takes = plan.request.aim.days, plan.run_s / SECONDS_PER_DAY
    if days is None or abs(takes / days - 1.0) < TIME_DOUBT:
        return []
    verdict = "longer than there is" if takes > days else "less than there is"
    return [f"the steps take {takes:.3g} days, not {days:g}: {verdict}, at the MFU of {plan.layout.mfu:.0%} that the layout should reach"]


def _warnings(plan: Plan) -> list[str]:
    budget, told = plan.model.budget, [*_time(plan), *plan.model.frontier.warnings, *plan.training.warnings]
    if not plan.validated:
        told.append("not validated: no sweep of your own runs stands behind the law; `surefoot sweep` makes one for 5 to 7% of the budget")
    if not _is_implied(plan.request) and abs(plan.layout.mfu / budget.mfu - 1.0) > MFU_DOUBT:
        told.append(f"the budget takes an MFU of {budget.mfu:.0%}, the layout is expected to reach {plan.layout.mfu:.0%} ({plan.stamp})")
    if plan.calibration.is_measured and plan.calibration.error > MUCH_ERROR:
        told.append(f"the measured runs are met to {plan.calibration.error:.0%} only: are their columns in the right units?")
    if plan.layout.untrainable:
        told.append(f"this layout is planned only: {plan.layout.untrainable}")
    if plan.layout.layout.num_devices > plan.request.cluster.accelerator.devices_per_node:
        told.append(SEVERAL_NODES)
    return [*told, *_when_a_node_is_lost(plan)]


def _when_a_node_is_lost(plan: Plan) -> list[str]:
    """A replica of the model is lost with each of its ranks; the batch is dealt to the rest."""
    layout, per_node = plan.layout.layout, plan.request.cluster.accelerator.devices_per_node
    of_one_replica = layout.num_devices // layout.data_ranks
    left = layout.data_ranks - max(1, per_node // of_one_replica)
    if layout.num_devices <= per_node or left < 1:
        return []
    text = uneven(plan.training.batch.batch, num_ranks=left, micro_batch_size=layout.micro_batch_size)
    return [f"when a node is lost and none is spare: {text}"] if text else []


def _reasons(plan: Plan) -> dict[str, Reason]:
    frontier, layout = plan.model.frontier, plan.layout
    how = (
        "as given; ZeRO and recomputation as they are fastest, where nothing is said of them"
        if plan.request.layout
        else f"the simplest of the fastest ({AS_FAST:.0%}) among {plan.ranked.counts.considered} considered"
    )
    used = f"{layout.layout.num_devices} of {plan.model.budget.num_devices}"
    own = {
        "choice.n": frontier.reason,
        "choice.tokens": Reason("what the budget leaves for that size", frontier.law.source),
        "choice.loss": Reason(f"by the surface of `{frontier.law.name}` ({frontier.law.corpus})", frontier.law.source),
        "layout": Reason(how, "--layout" if plan.request.layout else "every legal layout, its memory and its time of a step"),
        "layout.memory": Reason("term by term, of the fullest device", "shapes, dtypes and what the backward keeps"),
        "layout.mfu": Reason(plan.stamp, "model of throughput"),
        "layout.bubble": Reason(
            "(p - 1) / (v m) of the ideal time, (p - 1) / (v m + p - 1) of all; the schedule played out beside", "arXiv 2104.04473"
        ),
        "layout.step_s": Reason("products, collectives that are not hidden, bubble and update", plan.stamp),
        "budget.goodput": Reason(
            f"useful share of the time {plan.goodput:.4g}, devices that are used {used}",
            "ETTR of arXiv 2410.21680",
        ),
    }
    if plan.request.aim.mfu is None and not _is_implied(plan.request):
        own["budget.mfu"] = Reason("what the layout is expected to reach", plan.stamp)
    return {**plan.model.reasons, **own, **plan.training.reasons, **reasons_of(plan.operation, plan.reliability)}
