"""A run's plan for its rest, as JSON has it and as a page. Pure. The keys are those of `plan.answer`, with `measured` beside."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from surefoot.core.units import show_bytes, show_count, show_duration
from surefoot.plan.answer import row_answer
from surefoot.plan.failures.answer import answer_of as reliability_answer
from surefoot.plan.failures.interval import SECONDS_PER_DAY
from surefoot.plan.layouts.layout_text import show_layout
from surefoot.plan.promise import promise
from surefoot.plan.rerun.replan import Replan
from surefoot.plan.tuning.training_choice import is_a_loss


def answer_of(plan: Replan) -> dict[str, Any]:
    facts, cluster = plan.facts, plan.cluster
    planned = facts.config.plan
    return {
        "schema_version": 1,
        "budget": {
            "flops": plan.frontier.flops,
            "exact_flops": plan.cost.exact,
            "accelerator": cluster.accelerator.name,
            "num_devices": cluster.num_devices,
            "days": plan.remaining_s / SECONDS_PER_DAY,
            "mfu": plan.mfu,
            "goodput": plan.reliability.goodput.value,
        },
        "frontier": [row_answer(row) for row in plan.frontier.rows],
        "choice": {**row_answer(plan.frontier.choice), "sizes": asdict(facts.sizes), "num_parameters": facts.sizes.num_parameters},
        "layout": {**plan.judged.as_dict(), "step_s": plan.step_s, "mfu": plan.mfu, "tokens_per_s": facts.pace.tokens_per_s},
        "layouts": [],
        "rejected": [],
        **reliability_answer(plan.reliability),
        "measured": {
            "step": facts.step,
            "step_s": facts.pace.step_s,
            "tokens_per_s": facts.pace.tokens_per_s,
            "mfu": plan.mfu,
            "stall_s": facts.pace.stall_s if facts.pace.num_saves else None,
            "write_s": facts.write_s,
            "restart_s": facts.restarts.restart_s,
            "lost_steps": facts.restarts.lost_steps,
            "num_failures": facts.num_failures,
            "observed_s": facts.observed_s,
            "failures_per_node_day": plan.rate,
            "failures_per_node_day_band": plan.rate_band,
            "loss": facts.loss,
            "planned": asdict(planned) if planned.law else None,
            "predicted_step_s": plan.judged.step_s,
        },
        "remaining": {"steps": plan.remaining_steps, "seconds": plan.remaining_s},
        "validated": planned.validated,
        "warnings": list(plan.warnings),
        "reasons": {path: asdict(reason) for path, reason in sorted(plan.reasons.items())},
    }


def page_of(plan: Replan) -> str:
    facts, found, told = plan.facts, plan.reliability, plan.reasons
    total = facts.config.train.num_steps
    rate_low, rate_high = plan.rate_band
    lines = [
        f"{facts.config.run.name}: step {facts.step} of {total}, {show_count(facts.sizes.num_parameters)} parameters on "
        f"{show_layout(facts.layout)}",
        "",
        "Measured",
        f"  step                 {facts.pace.step_s:.3g} s, {show_count(facts.pace.tokens_per_s)} tokens/s   [{told['layout.step_s'].why}]",
        f"  MFU                  {plan.mfu:.1%} of {plan.cluster.accelerator.name}   [{told['layout.mfu'].source}]",
        f"  a save blocks        {found.interval.stall_s:.3g} s   [{told['checkpoint.stall_s'].why}]",
        f"  a save is written in {found.interval.write_s:.3g} s",
        f"  a restart takes      {plan.operation.restart_s:.3g} s   [{_restart(plan)}]",
        f"  failures             {facts.num_failures} in {show_duration(facts.observed_s)}; {plan.rate:.3g} per node and day "
        f"({rate_low:.3g} to {rate_high:.3g})   [{told['reliability.failures'].why}]",
    ]
    if planned := promise(facts.config.plan):
        lines += ["", "Planned", f"  {planned}"]
    retention = found.retention
    lines += [
        "",
        "The rest",
        f"  steps                {plan.remaining_steps}, done in {show_duration(plan.remaining_s)}",
        f"  goodput              {found.goodput.value:.2%}, 95% {found.goodput.band[0]:.2%} to {found.goodput.band[1]:.2%}",
        f"  failures             {found.failures.expected:.3g} expected, 95% {found.failures.band[0]} to {found.failures.band[1]}",
        f"  save every           {found.interval.steps} steps, {found.interval.seconds:.3g} s   [{told['checkpoint.interval_s'].why}]",
        f"  keep                 keep_last {retention.keep_last}, cover_steps {retention.cover_steps}, milestone_steps "
        f"{retention.milestone_steps}: {show_bytes(found.bytes.peak)} at the most   [{told['checkpoint.retention'].why}]",
    ]
    if is_a_loss(plan.frontier.choice.loss, vocab_size=facts.sizes.vocab_size):
        lines.append(f"  loss at the end      {plan.frontier.choice.loss:.3f}   [{told['choice.loss'].why}]")
    return "\n".join([*lines, "", "Mind", *[f"  - {warning}" for warning in plan.warnings]])


def _restart(plan: Replan) -> str:
    restarts = plan.facts.restarts
    if restarts.restart_s is None:
        return "assumed: none was measured"
    return f"median of {restarts.num}; {restarts.lost_steps:.3g} steps done again each time"
