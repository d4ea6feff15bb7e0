"""Why each number of a run's reliability is what it is, under the path that JSON has it at. Pure."""

from __future__ import annotations

from surefoot.plan.failures.rates import HIGHEST, LOWEST
from surefoot.plan.failures.reliability import Operation, Reliability
from surefoot.plan.failures.retention import MARGIN
from surefoot.plan.failures.spares import Spares
from surefoot.plan.records import Reason


def reasons_of(operation: Operation, found: Reliability) -> dict[str, Reason]:
    """For `checkpoint` and `reliability`."""
    return {**_of_checkpoints(operation, found), **_of_failures(operation, found)}


def spares_reason(spares: Spares) -> Reason:
    """The same words wherever spares are told."""
    return Reason(
        f"at {spares.per_node_day:.3g} per node and day, the higher rate where there are two, {spares.node_share:.0%} of it taking a node "
        f"for {spares.repair_s / 3600.0:g} h: {spares.mean_in_repair:.2g} in repair on average, at most {spares.num_nodes} for "
        f"{spares.probability:.0%} of the time",
        "Poisson (C. Palm, 1943); what takes a node: arXiv 2407.21783, table 5",
    )


def _of_failures(operation: Operation, found: Reliability) -> dict[str, Reason]:
    failures, is_published = found.failures, operation.failures_per_node_day is None
    up_to = f"; up to {failures.per_node_day_range[1]:.3g}" if is_published else ""
    every = f"one in {failures.mtbf_s / 3600.0:,.1f} h"
    return {
        "reliability.failures": Reason(
            f"{failures.per_node_day:.3g} per node and day on {operation.num_nodes:.4g} nodes, {every}{up_to}",
            f"{LOWEST.source}; {HIGHEST.source}" if is_published else "as given or measured",
        ),
        "reliability.goodput": Reason(
            f"(1 - (R + interval / 2) / M) / (1 + stall / interval), R = {operation.restart_s:g} s", "ETTR of arXiv 2410.21680, first order"
        ),
        "reliability.cost": Reason(
            f"{operation.num_devices} devices at {operation.price_per_hour:g} USD an hour; a failure costs a restart and half an interval",
            "arithmetic",
        ),
        "reliability.spares": spares_reason(found.spares),
    }


def _of_checkpoints(operation: Operation, found: Reliability) -> dict[str, Reason]:
    interval, retention = found.interval, found.retention
    if interval.young_s > operation.total_s / operation.least_saves > interval.write_s:
        every = Reason(
            f"{operation.least_saves} times in the run: failures alone would ask for one in {interval.young_s:.3g} s", "a rule of this plan"
        )
    elif interval.write_s > interval.young_s:
        every = Reason(
            f"a save takes {interval.write_s:.3g} s to be written, and the next must not begin before",
            "the disk of a node shared by its ranks" if operation.write_s is None else "as given or measured",
        )
    else:
        every = Reason(
            f"sqrt(2 x {interval.stall_s:.3g} s x {found.failures.mtbf_s:.0f} s): how long a save blocks, how rarely a failure comes",
            "Young, CACM 17(9), 1974; Daly and arXiv 2410.18124 beside it",
        )
    if operation.stall_s is None:
        stall = Reason(
            f"assumed until a run has measured it: the copy to the host takes {found.times.stage_s:.2g} s and hides behind the next step",
            f"link of {operation.hardware.host_link / 1e9:g} GB/s: {operation.hardware.source}",
        )
    else:
        stall = Reason("how long a save blocks the loop", "as given or measured")
    return {
        "checkpoint.interval_s": every,
        "checkpoint.stall_s": stall,
        "checkpoint.retention": Reason(
            f"the slowest detector speaks {retention.latency_steps} steps late; x {MARGIN:g}, at distances that double",
            "a checkpoint that was taken after the fault cannot be gone back to (arXiv 1310.8486, arXiv 2410.18124)",
        ),
        "checkpoint.bytes": Reason(
            f"{found.bytes.total / 1e9:.3g} GB shared by {operation.num_devices} ranks; {found.bytes.num_kept} kept and one being written",
            "weights, masters and moments by their dtypes",
        ),
    }
