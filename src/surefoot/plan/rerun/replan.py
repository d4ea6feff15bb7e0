"""A run planned again from what it has measured of itself: pace, stall of a save, failures, time of a restart. Pure.

Model, data and layout are those of the run; what is asked is when it will be done, what is still lost on the way, how often to save, and
how the measured figures compare with those that were planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from surefoot.core.layouts import pipeline_chunks
from surefoot.core.model_sizes import ModelSizes
from surefoot.core.sections import RunConfig
from surefoot.plan.failures.checkpoint_sizes import saved_bytes
from surefoot.plan.failures.interval import SECONDS_PER_DAY
from surefoot.plan.failures.rates import LOWEST
from surefoot.plan.failures.reasons import reasons_of
from surefoot.plan.failures.reliability import LEAST_SAVES, Operation, Reliability, assess
from surefoot.plan.layout_choice import dtypes_of, program_of
from surefoot.plan.layouts.calibration import DEFAULT
from surefoot.plan.layouts.judge import Judged, judge
from surefoot.plan.records import Layout, Reason, Workload
from surefoot.plan.request import Cluster
from surefoot.plan.rerun.measured_run import Pace, Restarts
from surefoot.plan.sizing.budget import TrainingCost, training_cost
from surefoot.plan.sizing.frontier import Frontier, Wish, frontier
from surefoot.plan.sizing.laws import Law, counted
from surefoot.plan.tuning.training_choice import is_a_loss

PRIOR_FAILURES = 1.0
"""What the published rate weighs beside the run's own failures: as much as having seen one."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """`observed_s` of training saw `num_failures`; `write_s` is from the begin of a save to its commit, None before the first."""

    config: RunConfig
    sizes: ModelSizes
    pace: Pace
    restarts: Restarts
    step: int
    num_failures: int
    observed_s: float
    write_s: float | None
    loss: float | None

    @property
    def layout(self) -> Layout:
        parallel = self.config.parallel
        return Layout(
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
            dp_shard=parallel.dp_shard,
            dp_replicate=parallel.dp_replicate,
            zero_stage=parallel.zero_stage,
            pp_schedule=parallel.pp_schedule,
            pp_chunks=pipeline_chunks(parallel) if parallel.pp > 1 else 1,
            recompute=parallel.recompute,
            micro_batch_size=self.config.train.micro_batch_size,
        )


@dataclass(frozen=True, slots=True)
class Replan:
    """`judged` is what the model of plans says of the layout; `mfu` and `step_s` are measured. `rate`: failures per node and day."""

    facts: RunFacts
    cluster: Cluster
    frontier: Frontier
    cost: TrainingCost
    workload: Workload
    judged: Judged
    step_s: float
    mfu: float
    rate: float
    rate_band: tuple[float, float]
    operation: Operation
    reliability: Reliability
    remaining_steps: int
    remaining_s: float
    warnings: tuple[str, ...]
    reasons: dict[str, Reason]


def replan(facts: RunFacts, cluster: Cluster, *, law: Law) -> Replan:
    """`cluster` gives what a run cannot measure: prices, the accelerator's data sheet, how late detectors speak."""
    config, sizes, layout = facts.config, facts.sizes, facts.layout
    cluster = replace(cluster, num_devices=layout.num_devices, dtype=config.train.precision)
    work = Workload(sizes, config.data.seq_len, config.train.global_batch_size, dtypes=dtypes_of(cluster.dtype))
    tokens = float(_num_samples(config) * config.data.seq_len)
    cost = training_cost(sizes, tokens=tokens, seq_len=config.data.seq_len)
    n = counted(sizes, law.counts, seq_len=config.data.seq_len)
    found = frontier(law, law.cost.flops(n, tokens), wish=Wish(n=n))
    judged = judge(work, cluster.accelerator, layout, implementation=program_of(cluster.accelerator))
    rate, band = failure_rate(facts, cluster)
    remaining = max(0, config.train.num_steps - facts.step)
    operation = _operation(facts, cluster, rate=rate, remaining=remaining)
    reliability = assess(operation)
    step_s = facts.pace.step_s
    mfu = cost.exact / config.train.num_steps / (step_s * layout.num_devices * cluster.accelerator.peak_flops(cluster.dtype))
    plan = Replan(
        facts=facts,
        cluster=cluster,
        frontier=found,
        cost=cost,
        workload=work,
        judged=judged,
        step_s=step_s,
        mfu=mfu,
        rate=rate,
        rate_band=band,
        operation=operation,
        reliability=reliability,
        remaining_steps=remaining,
        remaining_s=remaining * step_s / max(1e-9, reliability.goodput.value),
        warnings=(),
        reasons={},
    )
    return replace(plan, warnings=tuple(_warnings(plan)), reasons=_reasons(plan))


def _num_samples(config: RunConfig) -> int:
    """Of the whole run, its ramp included: each batch from the first step at or after its sample."""
    seen = 0
    ramp = config.train.batch_ramp or ((0, config.train.global_batch_size),)
    for _ in range(config.train.num_steps):
        seen += next((batch for first, batch in reversed(ramp) if first <= seen), config.train.global_batch_size)
    return seen


def failure_rate(facts: RunFacts, cluster: Cluster) -> tuple[float, tuple[float, float]]:
    """Per node and day: the run's own failures, with the published rate weighing as one failure (a gamma prior). The band is 95% of the
    posterior, by the Wilson and Hilferty cube root."""
    if cluster.failures_per_node_day is not None:
        return cluster.failures_per_node_day, (cluster.failures_per_node_day, cluster.failures_per_node_day)
    per_node = cluster.accelerator.devices_per_node
    nodes = (cluster.num_devices or 1) / per_node
    prior = LOWEST.on_nodes_of(per_node)
    shape = PRIOR_FAILURES + facts.num_failures
    node_days = PRIOR_FAILURES / prior + nodes * facts.observed_s / SECONDS_PER_DAY
    low, high = (_gamma_quantile(shape, deviate) for deviate in (-1.96, 1.96))
    return shape / node_days, (low / node_days, high / node_days)


def _gamma_quantile(shape: float, deviate: float) -> float:
    ninth = 1.0 / (9.0 * shape)
    return shape * max(0.0, 1.0 - ninth + deviate * math.sqrt(ninth)) ** 3


def _operation(facts: RunFacts, cluster: Cluster, *, rate: float, remaining: int) -> Operation:
    """Of the steps that are left; of all of them where none is."""
    step_s, num_steps = facts.pace.step_s, facts.config.train.num_steps
    return Operation(
        hardware=cluster.accelerator,
        num_devices=cluster.num_devices or 1,
        state_bytes=saved_bytes(facts.sizes.num_parameters, dtypes_of(cluster.dtype)),
        step_s=step_s,
        tokens_per_step=facts.pace.tokens_per_step,
        total_s=(remaining or num_steps) * step_s,
        failures_per_node_day=rate,
        stall_s=facts.pace.stall_s if facts.pace.num_saves else cluster.stall_s,
        write_s=facts.write_s,
        restart_s=facts.restarts.restart_s if facts.restarts.restart_s is not None else cluster.restart_s,
        detection_s=cluster.detection_s,
        price_per_hour=cluster.usd_per_hour,
        least_saves=max(1, round(LEAST_SAVES * (remaining or num_steps) / num_steps)),  # the rest's share of a whole run's
    )


def _warnings(plan: Replan) -> list[str]:
    told, section = list(plan.frontier.warnings), plan.facts.config.plan
    if section.step_s and abs(plan.step_s / section.step_s - 1.0) > 0.1:
        told.append(f"a step takes {plan.step_s:.3g} s, {plan.step_s / section.step_s:.2f} times what was planned")
    if not is_a_loss(plan.frontier.choice.loss, vocab_size=plan.facts.sizes.vocab_size):
        told.append("the law's loss is more than guessing costs: it does not reach this far, and says nothing of this run")
    if plan.mfu > 1.0:
        told.append(
            f"an MFU of {plan.mfu:.0%} is no MFU: the accelerator is not {plan.cluster.accelerator.name}; name it with --accelerator"
        )
    found, now = plan.reliability.interval, plan.facts.config.checkpoint.interval_steps
    is_by_failures = found.young_s <= 1.1 * found.seconds
    if is_by_failures and isinstance(now, int) and now and abs(now - found.steps) > 0.5 * found.steps:
        told.append(f"checkpoint.interval_steps is {now}: by what was measured {found.steps} would lose the least time")
    if not plan.facts.pace.num_saves:
        told.append("no save has been measured yet: its stall is assumed")
    if plan.facts.restarts.restart_s is None:
        told.append("no restart has been measured yet: its time is assumed")
    return told


def _reasons(plan: Replan) -> dict[str, Reason]:
    facts = plan.facts
    steps, saves = f"median of {facts.pace.num_steps} steps", f"median of {facts.pace.num_saves} saves"
    return {
        **reasons_of(plan.operation, plan.reliability),
        "layout.step_s": Reason(steps, "metrics of the run"),
        "layout.mfu": Reason(f"exact FLOPs of a step over {steps} and the dense peak", plan.cluster.accelerator.source),
        "layout.memory": Reason("term by term, of the fullest device; not measured", "shapes, dtypes and what the backward keeps"),
        "choice.n": Reason("the run's own size", "its config"),
        "choice.loss": Reason(f"by the surface of `{plan.frontier.law.name}`, not of this data", plan.frontier.law.source),
        "checkpoint.stall_s": Reason(saves if facts.pace.num_saves else "assumed", "metrics of the run"),
        "reliability.failures": Reason(
            f"{facts.num_failures} in {facts.observed_s / 3600.0:.3g} h; the published rate weighs as one failure",
            f"ledger of the run; {LOWEST.source}",
        ),
        "measured.restart_s": Reason(f"median of {facts.restarts.num} restarts", "metrics of the run"),
        "measured.calibration": Reason("what the layout was expected to take before anything was measured", DEFAULT.stamp),
    }
