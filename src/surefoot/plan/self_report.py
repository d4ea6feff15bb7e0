"""What a plan has to say of itself: warnings, the most costly first, and the reason of every number. Pure."""

from __future__ import annotations

from surefoot.plan.composed import Plan
from surefoot.plan.failures.interval import SECONDS_PER_DAY
from surefoot.plan.failures.reasons import reasons_of
from surefoot.plan.layout_choice import AS_FAST
from surefoot.plan.records import Reason
from surefoot.plan.request import Request
from surefoot.plan.sizing import published
from surefoot.plan.sizing.laws import Law
from surefoot.plan.tuning.batch import uneven

TIME_DOUBT = 0.02
"""Relative difference between the time that was given and what the steps take, from which on it is said."""

MUCH_ERROR = 0.3
"""Mean relative error of a calibration on its own rows, from which on something is wrong with them."""

SEVERAL_NODES = "several machines: `surefoot train` starts the ranks of one in this release; torchrun starts the same worker on more"

MFU_DOUBT = 0.1
"""Relative difference between the MFU of the budget and that of the layout, from which on it is said."""


def warnings_of(plan: Plan) -> list[str]:
    budget, told = plan.model.budget, [*_time(plan), *plan.model.frontier.warnings, *plan.training.warnings]
    if not plan.validated:
        told.append("not validated: no sweep of your own runs stands behind the law; `surefoot sweep` makes one for 5 to 7% of the budget")
    if not _is_implied(plan.request) and abs(plan.layout.mfu / budget.mfu - 1.0) > MFU_DOUBT:
        told.append(f"the budget takes an MFU of {budget.mfu:.0%}, the layout is expected to reach {plan.layout.mfu:.0%} ({plan.stamp})")
    played = plan.layout.bubble.played
    if played is not None and played.idle_of_total > plan.request.max_bubble:
        told.append(
            f"played out, the pipeline idles {played.idle_of_total:.0%}: its stages are uneven, and the closed form is of even ones"
        )
    if plan.calibration.is_measured and plan.calibration.error > MUCH_ERROR:
        told.append(f"the measured runs are met to {plan.calibration.error:.0%} only: are their columns in the right units?")
    if plan.layout.untrainable:
        told.append(f"this layout is planned only: {plan.layout.untrainable}")
    if plan.layout.layout.num_devices > plan.request.cluster.accelerator.devices_per_node:
        told.append(SEVERAL_NODES)
    return [*told, *_when_a_node_is_lost(plan)]


def plan_reasons(plan: Plan) -> dict[str, Reason]:
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
        "choice.loss": _of_loss(frontier.law),
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
    if plan.request.aim.days is not None and plan.request.aim.flops is None:
        own["budget.flops"] = Reason("devices x seconds x dense peak x MFU, before failures and reserve", "arithmetic")
    else:
        own["budget.flops"] = Reason("as given: 6 N D, as laws count", "arithmetic")
    own["budget.useful_flops"] = Reason("what is executed for the model, counted exactly", "arithmetic")
    if plan.request.aim.mfu is None and not _is_implied(plan.request):
        own["budget.mfu"] = Reason("what the layout is expected to reach", plan.stamp)
    return {**plan.model.reasons, **own, **plan.training.reasons, **reasons_of(plan.operation, plan.reliability)}


def _of_loss(law: Law) -> Reason:
    """A law that knows sizes alone has its losses from elsewhere."""
    if law.surface:
        return Reason(f"by the surface of `{law.name}` ({law.corpus})", law.source)
    if law.reference:
        return Reason("by the surface that was fitted to the same runs", law.source)
    return Reason("by the surface of `epoch`: the law knows sizes alone", published.law("epoch").source)


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


def _when_a_node_is_lost(plan: Plan) -> list[str]:
    """A replica of the model is lost with each of its ranks; the batch is dealt to the rest."""
    layout, per_node = plan.layout.layout, plan.request.cluster.accelerator.devices_per_node
    of_one_replica = layout.num_devices // layout.data_ranks
    left = layout.data_ranks - max(1, per_node // of_one_replica)
    if layout.num_devices <= per_node or left < 1:
        return []
    text = uneven(plan.training.batch.batch, num_ranks=left, micro_batch_size=layout.micro_batch_size)
    return [f"when a node is lost and none is spare: {text}"] if text else []
