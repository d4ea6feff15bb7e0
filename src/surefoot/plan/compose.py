"""From a request to a plan: budget, model, layout, training, saves and failures, in one consistent calculation. Pure.

What failures cost is needed before the model is known, because it shortens the budget, and follows from the model. It is small and moves
slowly, so a first model at full goodput gives it. Model and layout decide each other by the MFU, and are settled in rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from surefoot.core.errors import PlanInfeasible
from surefoot.plan.composed import Plan
from surefoot.plan.failures.checkpoint_sizes import saved_bytes
from surefoot.plan.failures.reliability import Operation, Reliability, assess
from surefoot.plan.layout_choice import Asked, asked_by, can_be_run, choose_layout, devices_used, dtypes_of
from surefoot.plan.layouts.calibration import DEFAULT, Calibration
from surefoot.plan.layouts.judge import Judged
from surefoot.plan.layouts.layout_text import show_layout
from surefoot.plan.layouts.pipeline_schedule import fewest_micro_batches
from surefoot.plan.layouts.recipe import Recipe, beside
from surefoot.plan.layouts.search import Ranked
from surefoot.plan.records import Layout, Workload
from surefoot.plan.request import Cluster, Request, check_request
from surefoot.plan.self_report import plan_reasons, warnings_of
from surefoot.plan.sizing import allocation
from surefoot.plan.sizing.laws import Law
from surefoot.plan.sizing.model_choice import ModelChoice, assumed_mfu, choose_model
from surefoot.plan.surface_record import Surface
from surefoot.plan.tuning.batch import REACH
from surefoot.plan.tuning.training_choice import TrainingChoice, choose_training, wished_batch

MAX_ROUNDS, AGREED = 12, 0.005
"""Of model and layout, until the MFU of the layout is that of the budget."""

SEARCH_AGAIN = 0.3
"""Difference of log N from which on the layouts of another model are no longer looked at."""


def make_plan(request: Request, *, law: Law, calibration: Calibration | None = None, validated: bool = False) -> Plan:
    """Raises ConfigError for what is asked wrongly, PlanInfeasible where nothing satisfies the request, with what would."""
    check_request(request)
    aim, mfu = request.aim, assumed_mfu(request.aim)
    model = choose_model(request.cluster, aim, law=law, goodput=1.0, mfu=mfu)
    request = replace(request, cluster=replace(request.cluster, num_devices=model.budget.num_devices))
    first = assess(_expected(model, request.cluster, mfu))
    _refuse_hopeless(first, request)
    num_used = devices_used(request, mean_in_repair=first.spares.mean_in_repair)
    asked = asked_by(request, num_devices=num_used, scale=calibration or DEFAULT)
    model, settled = _agreed(asked, request, model, law=law, goodput=first.goodput.value * num_used / model.budget.num_devices)
    ranked, recipe = _others(asked, settled)
    operation = _operation(request, model, settled, goodput=first.goodput.value)
    operation = _operation(request, model, settled, goodput=assess(operation).goodput.value)
    reliability = assess(operation)
    plan = Plan(
        request=request,
        law=law,
        model=model,
        workload=settled.work,
        training=settled.training,
        layout=settled.chosen,
        ranked=ranked,
        recipe=recipe,
        num_idle=model.budget.num_devices - num_used,
        calibration=asked.scale,
        operation=operation,
        reliability=reliability,
        goodput=first.goodput.value,
        run_s=operation.total_s,
        validated=validated,
        warnings=(),
        reasons={},
    )
    return replace(plan, warnings=tuple(warnings_of(plan)), reasons=plan_reasons(plan))


@dataclass(frozen=True, slots=True)
class _Settled:
    """A layout, and how the model is trained on it. `ranked` is of the model that was searched for."""

    ranked: Ranked
    chosen: Judged
    training: TrainingChoice
    work: Workload


def _agreed(asked: Asked, request: Request, model: ModelChoice, *, law: Law, goodput: float) -> tuple[ModelChoice, _Settled]:
    """Model and layout in turns, from a first model on, until the MFU of the one is that of the other."""
    aim, mfu = request.aim, assumed_mfu(request.aim)
    settled, searched_n = _searched(asked, request, model), model.sizes.num_parameters
    for _ in range(MAX_ROUNDS):
        mfu = aim.mfu or math.sqrt(mfu * settled.chosen.mfu)  # half the way, in logs: a smaller model is often slower, too
        model = choose_model(request.cluster, aim, law=law, goodput=goodput, mfu=mfu)
        is_another = abs(math.log(model.sizes.num_parameters / searched_n)) > SEARCH_AGAIN
        settled = _searched(asked, request, model) if is_another else _settled(asked, request, model, settled)
        searched_n = model.sizes.num_parameters if is_another else searched_n
        if aim.mfu or abs(settled.chosen.mfu / mfu - 1.0) < AGREED:
            break
    return model, settled


def _searched(asked: Asked, request: Request, model: ModelChoice) -> _Settled:
    wished = _workload(request, model, _wished(request, model, asked.num_devices))
    ranked, chosen = choose_layout(asked, wished)
    found = _trained(asked, request, model, ranked, chosen.layout)
    if found is None:
        raise PlanInfeasible(f"{show_layout(chosen.layout)} cannot be timed", where="layout", hint="name another one with --layout")
    return found


def _settled(asked: Asked, request: Request, model: ModelChoice, before: _Settled) -> _Settled:
    """The same layout under this model and the batch that follows; searched anew where it no longer fits."""
    again = _trained(asked, request, model, before.ranked, before.chosen.layout)
    return again if again is not None and can_be_run(again.chosen) else _searched(asked, request, model)


def _trained(asked: Asked, request: Request, model: ModelChoice, ranked: Ranked, layout: Layout) -> _Settled | None:
    training = _training(request, model, layout)
    work = _workload(request, model, training.batch.batch)
    judged = asked.tried(work, layout)
    return _Settled(ranked, judged, training, work) if judged is not None else None


def _others(asked: Asked, settled: _Settled) -> tuple[Ranked, Recipe | None]:
    """The other layouts, and the textbook's, under the same model and batch as the chosen one."""
    again = (asked.tried(settled.work, one.layout) for one in settled.ranked.layouts)
    layouts = tuple(sorted((one for one in again if one is not None and one.legal), key=lambda one: one.step_s))
    standard = asked.textbook(settled.work)
    return replace(settled.ranked, layouts=layouts), beside(standard, layouts[0]) if standard and layouts else None


def _workload(request: Request, model: ModelChoice, batch: int) -> Workload:
    return Workload(model.sizes, model.seq_len, batch, dtypes=dtypes_of(request.cluster.dtype))


def _wished(request: Request, model: ModelChoice, num_devices: int) -> int:
    loss = model.frontier.choice.loss
    return request.aim.global_batch_size or wished_batch(
        model.sizes, tokens=model.tokens, loss=loss, seq_len=model.seq_len, num_devices=num_devices
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
        data_ranks=_data_ranks(request, layout),
        micro_batch_size=layout.micro_batch_size,
        wished=_in_whole_rounds(_wished(request, model, layout.num_devices), layout),
        least_micro_batches=least,
        given_batch=request.aim.global_batch_size,
    )


def _data_ranks(request: Request, layout: Layout) -> range:
    """That the run may come to have: a shrink leaves whole replicas, and changes nothing but their number."""
    of_a_replica = layout.num_devices // layout.data_ranks
    fewest = max(1, (request.cluster.min_devices or layout.num_devices) // of_a_replica)
    return range(min(fewest, layout.data_ranks), layout.data_ranks + 1)


def _in_whole_rounds(wished: int, layout: Layout) -> int:
    """Interleaved pieces take micro-batches in rounds of the stages; what is missing would be filled up with phantoms."""
    unit = layout.data_ranks * layout.micro_batch_size * (layout.pp if layout.pp_chunks > 1 else 1)
    whole = max(1, round(wished / unit)) * unit
    return whole if abs(whole / wished - 1.0) <= REACH else wished


def _surface(model: ModelChoice) -> Surface:
    """The law's own, or the shape that was borrowed for it."""
    return allocation.bowl(model.frontier.law, model.law_flops).surface


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


def _expected(model: ModelChoice, cluster: Cluster, mfu: float) -> Operation:
    """Before a layout is known: at the MFU of the budget, with steps of a minute at the most."""
    seconds = model.cost.exact / (model.budget.num_devices * model.budget.peak_flops * mfu)
    num_steps = max(1e4, seconds / 60.0)
    operation = _operated(cluster, model, num_devices=model.budget.num_devices, step_s=seconds / num_steps, total_s=seconds)
    return replace(operation, tokens_per_step=model.tokens / num_steps)


def _operation(request: Request, model: ModelChoice, settled: _Settled, *, goodput: float) -> Operation:
    """Wall time: machines fail while they restart, too."""
    step_s, tokens_per_step = settled.chosen.step_s, settled.work.tokens_per_step
    total_s = model.tokens / tokens_per_step * step_s / max(1e-9, goodput)  # smaller steps of a ramp take less time
    num_devices = settled.chosen.layout.num_devices
    operation = _operated(request.cluster, model, num_devices=num_devices, step_s=step_s, total_s=total_s)
    return replace(operation, tokens_per_step=tokens_per_step, num_steps=settled.training.num_steps)


def _operated(cluster: Cluster, model: ModelChoice, *, num_devices: int, step_s: float, total_s: float) -> Operation:
    return Operation(
        hardware=cluster.accelerator,
        num_devices=num_devices,
        state_bytes=saved_bytes(model.sizes.num_parameters, dtypes_of(cluster.dtype)),
        step_s=step_s,
        tokens_per_step=0.0,
        total_s=total_s,
        failures_per_node_day=cluster.failures_per_node_day,
        stall_s=cluster.stall_s,
        restart_s=cluster.restart_s,
        detection_s=cluster.detection_s,
        price_per_hour=cluster.usd_per_hour,
    )
