"""The page of `surefoot sweep plan`, and what of it is written down."""

from __future__ import annotations

from typing import Any

from surefoot.core.units import show_count
from surefoot.plan.sweeps.sweep import Sweep, SweepRun


def about_of(planned: Sweep, *, law: str, max_flops: float, target: float, prepared_tokens: int | None) -> dict[str, Any]:
    design = planned.design
    return {
        "law": design.law.name,
        "law_asked": law,
        "law_source": design.law.source,
        "counts": design.law.counts,
        "budgets": sorted({run.budget_flops for run in planned.runs}),
        "widths": list(design.widths),
        "varied": design.varied,
        "values": list(design.values),
        "lr_rule": design.rate_rule,
        "num_runs": len(planned.runs),
        "trained_flops": planned.trained_flops,
        "flops_alone": planned.flops_alone,
        "flops_6nd": sum(run.flops_6nd for run in planned.runs),
        "target_flops": target or None,
        "share_of_target": planned.trained_flops / target if target else None,
        "max_flops": max_flops or None,
        "most_tokens": planned.most_tokens,
        "prepared_tokens": prepared_tokens,
        "epochs": planned.most_tokens / prepared_tokens if prepared_tokens else None,
        "notes": list(planned.notes),
    }


def run_told(run: SweepRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "parent": run.parent or None,
        "branch_step": run.branch_step,
        "budget_flops": run.budget_flops,
        "n": run.sizes.num_parameters,
        "n_without_embedding": run.sizes.num_body_parameters,
        "tokens": run.tokens,
        "num_steps": run.config.train.num_steps,
        "lr": run.config.optimizer.lr,
        "batch_tokens": run.config.train.global_batch_size * run.config.data.seq_len,
        "flops": run.flops,
        "flops_6nd": run.flops_6nd,
        "trained_flops": run.trained_flops,
    }


def page_of(planned: Sweep, about: dict[str, Any]) -> list[str]:
    lines = [f"{'run':<24} {'n':>8} {'no embed.':>9} {'tokens':>8} {'D/N':>6} {'steps':>7} {'lr':>8}  {'FLOPs':>8} {'trained':>8}"]
    for run in sorted(planned.runs, key=lambda one: (one.budget_flops, one.sizes.num_parameters)):
        n, body = run.sizes.num_parameters, run.sizes.num_body_parameters
        lines.append(
            f"{run.name:<24} {show_count(n):>8} {show_count(body):>9} {show_count(run.tokens):>8} {run.tokens / n:>6.3g} "
            f"{run.config.train.num_steps:>7} {run.config.optimizer.lr:>8.3g}  {run.flops:>8.3g} {run.trained_flops:>8.3g}"
            + (f"  from {run.parent} at {run.branch_step}" if run.parent else "")
        )
    expected = f"best sizes expected by {about['law']} ({about['law_source']}), which counts N as: {about['counts']}"
    lines += ["", "every width for the steps of the base" if about["widths"] else expected]
    shared = about["flops_alone"] - about["trained_flops"]
    saved = f", {about['flops_alone']:.4g} if none shared a stable phase with another" if shared else ""
    lines.append(f"{about['num_runs']} runs train {about['trained_flops']:.4g} FLOPs, counted exactly{saved}")
    lines.append(f"for comparison, 6 N D of all runs, with nothing shared: {about['flops_6nd']:.4g}")
    if about["share_of_target"]:
        groups = "; ".join(f"{budget:.3g}: {_group_share(planned, budget, about):.2%}" for budget in about["budgets"])
        lines.append(
            f"that is {about['share_of_target']:.2%} of the {about['target_flops']:.3g} aimed at (by budget, without sharing: {groups})"
        )
    if about["prepared_tokens"]:
        lines.append(f"the longest run reads {show_count(about['most_tokens'])} tokens: {about['epochs']:.3g} epochs of what is prepared")
        if about["epochs"] > 4:
            lines.append("note: beyond 4 epochs tokens that were seen before are worth less (arXiv 2305.16264), which bends a law")
    else:
        lines.append(f"the longest run reads {show_count(about['most_tokens'])} tokens; the data is not prepared yet")
    return lines + [f"note: {note}" for note in about["notes"]]


def _group_share(planned: Sweep, budget: float, about: dict[str, Any]) -> float:
    return float(sum(run.flops for run in planned.runs if run.budget_flops == budget) / about["target_flops"])
