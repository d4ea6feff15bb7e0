"""A plan as JSON has it: stable keys, plain numbers in bytes, seconds, FLOPs and US dollars, the reason of each under its path. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from surefoot.plan.composed import Plan
from surefoot.plan.failures.answer import answer_of as reliability_answer
from surefoot.plan.sizing.frontier import Frontier, Row
from surefoot.plan.tuning.laws import SideBySide


def answer_of(plan: Plan) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "budget": _budget(plan),
        "law": _law(plan.model.frontier),
        "frontier": [row_answer(row) for row in plan.model.frontier.rows],
        "choice": _choice(plan),
        "training": _training(plan),
        "layout": plan.layout.as_dict(),
        "layouts": [judged.as_dict() for judged in plan.ranked.layouts],
        "recipe": plan.recipe.as_dict() if plan.recipe else None,
        "rejected": [rejected.as_dict() for rejected in plan.ranked.rejected],
        "counts": asdict(plan.ranked.counts),
        "calibration": plan.calibration.as_dict(),
        **reliability_answer(plan.reliability),
        "validated": plan.validated,
        "warnings": list(plan.warnings),
        "reasons": {path: asdict(reason) for path, reason in sorted(plan.reasons.items())},
    }


def _budget(plan: Plan) -> dict[str, Any]:
    """`flops` is what the devices do in the time at that MFU, `useful_flops` what is left of it after failures and idle devices, and
    `law_flops` is that as laws count, 6 N D."""
    budget = plan.model.budget
    days_given = plan.request.aim.days is not None and plan.request.aim.flops is None
    return {
        "flops": budget.flops / budget.goodput if days_given else plan.model.law_flops,
        "useful_flops": budget.flops,
        "law_flops": plan.model.law_flops,
        "accelerator": budget.accelerator.name,
        "peak_flops": budget.peak_flops,
        "dtype": budget.dtype,
        "num_devices": budget.num_devices,
        "num_idle": plan.num_idle,
        "days": budget.days,
        "mfu": budget.mfu,
        "goodput": budget.goodput,
        "device_hours": budget.device_hours,
        "cost_usd": budget.cost(plan.request.cluster.usd_per_hour),
    }


def _law(frontier: Frontier) -> dict[str, Any]:
    law = frontier.law
    return {
        "name": law.name,
        "counts": law.counts,
        "source": law.source,
        "corpus": law.corpus,
        "flops_range": law.flops_range,
        "extrapolation": frontier.extrapolation,
        "n_band": frontier.n_band,
        "tokens_per_parameter_band": frontier.ratio_band,
        "loss_of_a_size_twice_the_best": frontier.larger_by_2,
        "loss_of_a_size_half_the_best": frontier.smaller_by_2,
    }


def row_answer(row: Row) -> dict[str, Any]:
    return {**asdict(row), "tokens_per_parameter": row.tokens_per_parameter}


def _choice(plan: Plan) -> dict[str, Any]:
    sizes, cost = plan.model.sizes, plan.model.cost
    return {
        **row_answer(plan.model.frontier.choice),
        "sizes": asdict(sizes),
        "num_parameters": sizes.num_parameters,
        "num_active_parameters": sizes.num_active_parameters,
        "num_parameters_without_embedding": sizes.num_body_parameters,
        "seq_len": plan.model.seq_len,
        "exact_flops": cost.exact,
        "six_nd_flops": cost.six_nd,
        "exact_over_six_nd": cost.ratio,
        "alternatives": [row_answer(row) for row in plan.model.frontier.rows if row.mark and row is not plan.model.frontier.choice],
    }


def _training(plan: Plan) -> dict[str, Any]:
    training = plan.training
    return {
        "num_steps": training.num_steps,
        "global_batch_size": training.batch.batch,
        "batch_tokens": training.batch.batch * plan.model.seq_len,
        "micro_batch_size": training.batch.micro_batch_size,
        "batch_ramp": [list(stage) for stage in training.ramp],
        "waste": training.batch.worst_waste,
        "waste_by_data_ranks": {str(count): share for count, share in training.batch.waste.items()},
        "even_batches": list(training.batch.even),
        "over_critical_batch": training.over_critical,
        "lr": training.lr,
        "schedule": {name: value for name, value in asdict(training.schedule).items() if name != "reasons"},
        "batch_laws": _laws(training.batch_laws),
        "lr_laws": _laws(training.lr_laws),
        "run_s": plan.run_s,
    }


def _laws(found: SideBySide) -> Mapping[str, Any]:
    return {
        "suggestions": [asdict(suggestion) for suggestion in found.suggestions],
        "chosen": found.chosen.law,
        "disagreement": found.disagreement,
    }
