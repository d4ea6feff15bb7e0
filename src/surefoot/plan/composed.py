"""The whole plan as one record: what follows from a request, every number with its reason. Frozen, torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.core.sections import PlanSection
from surefoot.plan.failures.reliability import Operation, Reliability
from surefoot.plan.layouts.calibration import Calibration
from surefoot.plan.layouts.judge import Judged
from surefoot.plan.layouts.recipe import Recipe
from surefoot.plan.layouts.search import Ranked
from surefoot.plan.records import Reason, Workload
from surefoot.plan.request import Request
from surefoot.plan.sizing.laws import Law
from surefoot.plan.sizing.model_choice import ModelChoice
from surefoot.plan.tuning.training_choice import TrainingChoice, is_a_loss

MEASURED_ON = ("h100", "h200", "h800", "a100", "a100-40gb")
"""What published runs calibrate the model of throughput for; others differ in more than their data sheet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`layout` is the one that the plan goes by: the given one, else the fastest. `goodput` is what the budget was reduced by.

    `num_idle` devices are left as spares, or because the best layout does not use them. `run_s` is what the steps take, failures included.
    """

    request: Request
    law: Law
    model: ModelChoice
    workload: Workload
    training: TrainingChoice
    layout: Judged
    ranked: Ranked
    recipe: Recipe | None
    num_idle: int
    calibration: Calibration
    operation: Operation
    reliability: Reliability
    goodput: float
    run_s: float
    validated: bool
    warnings: tuple[str, ...]
    reasons: dict[str, Reason]

    @property
    def run_usd(self) -> float:
        """All devices of the budget, for as long as the steps take."""
        return self.model.budget.num_devices * self.run_s / 3600.0 * self.request.cluster.usd_per_hour

    @property
    def stamp(self) -> str:
        """How far the step time is to be trusted."""
        if self.calibration.is_measured or self.model.budget.accelerator.name in MEASURED_ON:
            return self.calibration.stamp
        return f"not calibrated, and fitted to H100 runs: for {self.model.budget.accelerator.name} it is a guess; give --measured"

    @property
    def promise(self) -> PlanSection:
        """What goes into the config, for the run to be measured by."""
        choice = self.model.frontier.choice
        known = is_a_loss(choice.loss, vocab_size=self.model.sizes.vocab_size)
        low, high = choice.loss_band if known and choice.loss_band else (0.0, 0.0)
        return PlanSection(
            law=self.law.name,
            validated=self.validated,
            loss=round(choice.loss, 4) if known else 0.0,
            loss_low=round(low, 4),
            loss_high=round(high, 4),
            step_s=float(f"{self.layout.step_s:.4g}"),
            memory_bytes=round(self.layout.memory.total),
        )
