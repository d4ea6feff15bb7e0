"""The textbook's layout, to be ranked beside the others: tp fills a node, pp makes it fit, the rest are data ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.core.errors import PlanInfeasible
from surefoot.plan.hardware import Accelerator
from surefoot.plan.layouts.calibration import Calibration
from surefoot.plan.layouts.judge import Estimate, Judged, judge
from surefoot.plan.layouts.legality import DEFAULT_LIMITS, Limits, axes_refusals
from surefoot.plan.layouts.search import divisors
from surefoot.plan.memory.implementations import SUREFOOT, Implementation
from surefoot.plan.records import Layout, Workload

SOURCE = "Megatron-LM's advice: tensor parallel inside a node, then as few stages as memory asks for (arXiv 2104.04473, takeaway 1 and 2)"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`slower`: step time over the best layout's, less one. `why`: where that time goes, the largest part first."""

    judged: Judged
    slower: float
    why: str

    def as_dict(self) -> dict[str, object]:
        return {"layout": self.judged.as_dict(), "slower": self.slower, "why": self.why, "source": SOURCE}


def recipe_layout(
    workload: Workload,
    hardware: Accelerator,
    num_devices: int,
    *,
    calibration: Calibration | None = None,
    limits: Limits = DEFAULT_LIMITS,
    implementation: Implementation = SUREFOOT,
    memory: Estimate | None = None,
) -> Judged:
    """The largest tp of a node, the fewest stages that fit, ZeRO 1, one sequence a micro-batch, recomputing only where nothing else fits.

    Its bubble is as it comes out, refused or not. Raises PlanInfeasible where it fits with no number of stages.
    """
    judged: Judged | None = None
    tp = max(size for size in divisors(num_devices) if size <= hardware.devices_per_node and _cuts(workload, hardware, size, limits))
    for recompute in ("none", "full"):
        for pp in (size for size in divisors(num_devices // tp) if size <= workload.sizes.num_layers):
            layout = Layout(tp=tp, pp=pp, dp_shard=num_devices // (tp * pp), zero_stage=1)
            judged = judge(
                workload,
                hardware,
                replace(layout, recompute=recompute),
                calibration=calibration,
                limits=limits,
                implementation=implementation,
                memory=memory,
                play=False,
            )
            if judged.fits and layout.data_ranks <= workload.global_batch_size:
                return judged
    reason = "; ".join(refusal.why for refusal in judged.refusals) if judged else "no tp divides it"
    raise PlanInfeasible(f"the recipe fits with no number of stages: tp = {tp}", where="layout = recipe", hint=reason)


def _cuts(workload: Workload, hardware: Accelerator, tp: int, limits: Limits) -> bool:
    return not any(refusal.kind in ("tp", "node") for refusal in axes_refusals(workload, hardware, Layout(tp=tp), limits))


def beside(recipe: Judged, best: Judged) -> Recipe:
    """Compared with the fastest layout of the same devices and batch."""
    slower = recipe.step_s / best.step_s - 1.0
    lost = sorted(((one - other, name) for name, one, other in _parts(recipe, best) if one > other), reverse=True)
    told = [f"{name} +{seconds:.3g} s" for seconds, name in lost if seconds > 0.01 * best.step_s][:3]
    refused = [refusal.why for refusal in recipe.refusals]
    if not told and not refused:
        return Recipe(recipe, slower, "as fast as the best")
    return Recipe(recipe, slower, "; ".join([*told, *refused]))


def _parts(one: Judged, other: Judged) -> list[tuple[str, float, float]]:
    names = {
        "compute_s": "compute and recomputation",
        "tensor_s": "tensor parallel",
        "context_s": "context parallel",
        "expert_s": "expert parallel",
        "passing_s": "passing between stages",
        "bubble_s": "bubble",
        "data_s": "weights and gradients between data ranks",
        "update_s": "update",
    }
    return [(word, getattr(one.step, name), getattr(other.step, name)) for name, word in names.items()]
