"""What failures do to a run: how often to save, what to keep, which share of the time is useful, what it costs, how many nodes in reserve.

Closed forms alone, so a plan has them at once; `simulation` draws what they leave out. A run's rate is a range between published
fleets unless it was measured; bands hold the range and the luck of one run together. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.plan.failures import interval as formulas
from surefoot.plan.failures.checkpoint_sizes import CheckpointBytes, SaveTimes, checkpoint_bytes, save_times
from surefoot.plan.failures.rates import HIGHEST, LOWEST, expected_failures, nodes_of, poisson_band
from surefoot.plan.failures.retention import Retention, retention_for
from surefoot.plan.failures.spares import REPAIR_S, Spares, spares_for
from surefoot.plan.hardware import Accelerator

STALL_S = 1.0
"""Of a save whose copy overlaps the next step, until it was measured: the wait for all ranks and for what is copied at once."""

LEAST_SAVES = 10
"""Of a whole run, however rare failures are: to stop it, look at it, or go back in it without beginning anew."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What is known of a run and its machines. None: by a named rule. `failures_per_node_day` may be one rate or a range (low, high).

    `restart_s` is from a failure to the next step; `detection_s` how late the slowest detector convicts a checkpoint.
    """

    hardware: Accelerator
    num_devices: int
    state_bytes: float
    step_s: float
    tokens_per_step: float
    total_s: float
    failures_per_node_day: float | tuple[float, float] | None = None
    stall_s: float | None = None
    write_s: float | None = None
    shared_bytes_per_s: float | None = None
    restart_s: float = 900.0
    detection_s: float = 6 * 3600.0
    price_per_hour: float = 3.0
    repair_s: float = REPAIR_S
    least_saves: int = LEAST_SAVES
    num_steps: int | None = None

    @property
    def num_nodes(self) -> float:
        return nodes_of(self.num_devices, devices_per_node=self.hardware.devices_per_node)

    @property
    def total_steps(self) -> int:
        return self.num_steps or max(1, int(self.total_s / self.step_s))


@dataclass(frozen=True, slots=True)
class Failures:
    """Interruptions in the whole run. `low` and `high` are expected at the ends of the range; `band` adds the luck of one run (95%)."""

    expected: float
    low: float
    high: float
    band: tuple[int, int]
    mtbf_s: float
    mtbf_range_s: tuple[float, float]
    per_node_day: float
    per_node_day_range: tuple[float, float]


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """`seconds` and `steps` between two saves; beside it what three formulas say, and what a save blocks and takes."""

    seconds: float
    steps: int
    young_s: float
    daly_s: float
    availability_s: float
    stall_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Useful share of the time, and where the rest goes. `band`: 95% of runs, over the range of rates."""

    value: float
    band: tuple[float, float]
    saving: float
    lost_work: float
    restarting: float


@dataclass(frozen=True, slots=True)
class Losses:
    """In money and tokens. A failure costs its restart and half an interval, at worst a whole one; all devices are paid for meanwhile."""

    run_usd: float
    hour_usd: float
    failure_usd: float
    failure_worst_usd: float
    failure_tokens: float
    restart_minute_usd: float
    restart_minutes_usd: float
    lost_usd: float
    lost_tokens: float


@dataclass(frozen=True, slots=True)
class Reliability:
    failures: Failures
    interval: SaveInterval
    retention: Retention
    bytes: CheckpointBytes
    times: SaveTimes
    goodput: Goodput
    cost: Losses
    spares: Spares


def assess(operation: Operation) -> Reliability:
    """Everything that follows; `reasons.reasons_of` says why each number is what it is."""
    failures = _failures(operation)
    times = save_times(
        operation.state_bytes,
        num_ranks=operation.num_devices,
        hardware=operation.hardware,
        shared_bytes_per_s=operation.shared_bytes_per_s,
    )
    interval = _interval(operation, failures, times)
    retention = retention_for(
        operation.detection_s, step_s=operation.step_s, interval_steps=interval.steps, total_steps=operation.total_steps
    )
    size = checkpoint_bytes(
        operation.state_bytes,
        num_ranks=operation.num_devices,
        devices_per_node=operation.hardware.devices_per_node,
        num_rolling=retention.num_rolling,
        num_milestones=retention.num_milestones,
    )
    goodput = _goodput(operation, failures, interval)
    cost = _losses(operation, failures, interval, goodput)
    spares = spares_for(failures.per_node_day_range[1], num_nodes=operation.num_nodes, repair_s=operation.repair_s)
    return Reliability(failures, interval, retention, size, times, goodput, cost, spares)


def _failures(operation: Operation) -> Failures:
    given = operation.failures_per_node_day
    per_node = operation.hardware.devices_per_node
    if given is None:
        low_rate, expected_rate, high_rate = (rate.on_nodes_of(per_node) for rate in (LOWEST, LOWEST, HIGHEST))
    elif isinstance(given, tuple):
        low_rate, high_rate = given
        expected_rate = math.sqrt(low_rate * high_rate)
    else:
        low_rate = expected_rate = high_rate = given
    means = [formulas.mtbf_s(rate, num_nodes=operation.num_nodes) for rate in (low_rate, expected_rate, high_rate)]
    low, expected, high = (expected_failures(mean, total_s=operation.total_s) for mean in means)
    return Failures(
        expected=expected,
        low=low,
        high=high,
        band=(poisson_band(low)[0], poisson_band(high)[1]),
        mtbf_s=means[1],
        mtbf_range_s=(means[2], means[0]),
        per_node_day=expected_rate,
        per_node_day_range=(low_rate, high_rate),
    )


def _interval(operation: Operation, failures: Failures, times: SaveTimes) -> SaveInterval:
    stall_s = STALL_S if operation.stall_s is None else operation.stall_s
    write_s = times.write_s if operation.write_s is None else operation.write_s
    young_s = formulas.young_s(stall_s, failures.mtbf_s)
    wanted_s = max(min(young_s, operation.total_s / operation.least_saves), write_s)
    steps = min(operation.total_steps, max(1, _whole_steps(wanted_s / operation.step_s, is_least=write_s >= wanted_s)))
    return SaveInterval(
        seconds=steps * operation.step_s,
        steps=steps,
        young_s=young_s,
        daly_s=formulas.daly_s(stall_s, failures.mtbf_s),
        availability_s=formulas.availability_s(stall_s, failures.mtbf_s, restart_s=operation.restart_s),
        stall_s=stall_s,
        write_s=write_s,
    )


def _whole_steps(steps: float, *, is_least: bool) -> int:
    """The optimum is flat and may be rounded either way; a save that is still being written may not be overtaken."""
    return math.ceil(steps) if is_least else round(steps)


def _goodput(operation: Operation, failures: Failures, interval: SaveInterval) -> Goodput:
    def kept(num_failures: float) -> float:
        if num_failures == 0:
            return 1.0 / (1.0 + interval.stall_s / interval.seconds)
        return formulas.kept_share(
            interval.seconds,
            stall_s=interval.stall_s,
            mtbf_s=operation.total_s / num_failures,
            restart_s=operation.restart_s,
        )

    value = kept(failures.expected)
    restarting = min(1.0, operation.restart_s / failures.mtbf_s)
    lost_work = min(1.0 - restarting, interval.seconds / 2.0 / failures.mtbf_s)
    return Goodput(
        value=value,
        band=(kept(failures.band[1]), kept(failures.band[0])),
        saving=1.0 - restarting - lost_work - value,
        lost_work=lost_work,
        restarting=restarting,
    )


def _losses(operation: Operation, failures: Failures, interval: SaveInterval, goodput: Goodput) -> Losses:
    hour_usd = operation.num_devices * operation.price_per_hour
    second_usd = hour_usd / 3600.0
    mean_s = operation.restart_s + interval.seconds / 2.0
    tokens_per_s = operation.tokens_per_step / operation.step_s
    return Losses(
        run_usd=second_usd * operation.total_s,
        hour_usd=hour_usd,
        failure_usd=second_usd * mean_s,
        failure_worst_usd=second_usd * (operation.restart_s + interval.seconds),
        failure_tokens=tokens_per_s * mean_s,
        restart_minute_usd=second_usd * 60.0,
        restart_minutes_usd=second_usd * 60.0 * failures.expected,
        lost_usd=second_usd * operation.total_s * (1.0 - goodput.value),
        lost_tokens=tokens_per_s * operation.total_s * (1.0 - goodput.value),
    )
