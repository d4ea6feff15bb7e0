"""How often large jobs are interrupted: published rates with their sources, what fails, and the arithmetic between nodes, devices and days.

A rate is per node and day of wall time, as fleets are reported; two fleets are compared per device-hour, for nodes may differ in size. All
unplanned interruptions count, software too. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from surefoot.plan.failures import interval as formulas
from surefoot.plan.failures.interval import SECONDS_PER_DAY

HOURS_PER_DAY = 24.0


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Interruptions of a job, as one fleet saw them."""

    name: str
    per_node_day: float
    devices_per_node: int
    source: str

    @property
    def per_device_hour(self) -> float:
        return self.per_node_day / (self.devices_per_node * HOURS_PER_DAY)

    @property
    def device_hours_per_failure(self) -> float:
        return 1.0 / self.per_device_hour

    def on_nodes_of(self, devices_per_node: int) -> float:
        """Per node and day where nodes have another number of devices: what fails are devices and what belongs to each."""
        return self.per_node_day * devices_per_node / self.devices_per_node

    def mtbf_s(self, num_devices: int) -> float:
        """Mean time between interruptions of a job that any of its devices interrupts."""
        return formulas.mtbf_s(self.per_node_day, num_nodes=nodes_of(num_devices, devices_per_node=self.devices_per_node))


def observed_rate(name: str, *, num_failures: float, num_devices: int, days: float, source: str, devices_per_node: int = 8) -> FailureRate:
    """The rate that `num_failures` of one job over `days` are."""
    return FailureRate(name, num_failures * devices_per_node / (num_devices * days), devices_per_node, source)


LLAMA_3 = observed_rate(
    "Llama 3",
    num_failures=419,
    num_devices=16_384,
    days=54,
    source="Llama 3, arXiv 2407.21783: 419 unexpected of 466, 54 days, 16,384 H100",
)
RSC_1 = FailureRate("Meta RSC-1", 6.5e-3, 8, "Meta's research clusters, arXiv 2410.21680: 6.50 per 1,000 node-days, A100")

LOWEST, HIGHEST = LLAMA_3, RSC_1
"""Between these two lies what is published of settled fleets. The first is one large pre-training job, so it is what is expected of one."""

LLAMA_3_CAUSES = {
    "node": {
        "faulty GPU": 148,
        "GPU HBM3": 72,
        "host maintenance": 32,
        "GPU SRAM": 19,
        "GPU system processor": 17,
        "network card": 7,
        "silent data corruption": 6,
        "GPU thermal": 6,
        "SSD": 3,
        "power supply": 3,
        "chassis": 2,
        "IO board": 2,
        "CPU": 2,
        "system memory": 2,
    },
    "process": {"software": 54, "NCCL timeout": 7, "dependency": 2},
    "large_scale": {"switch or cable": 35},
}
"""Counts of arXiv 2407.21783, table 5, by what they take away. A switch or cable is counted as large-scale: it serves several nodes. The
share that the table prints for faulty GPUs (30.1%) is not that of its count; the counts are the ones that add up."""


def llama_3_shares() -> dict[str, float]:
    """Share of all interruptions by grade: process, node, large_scale. They sum to 1."""
    counts = {grade: sum(causes.values()) for grade, causes in LLAMA_3_CAUSES.items()}
    total = sum(counts.values())
    return {grade: count / total for grade, count in counts.items()}


def expected_failures(mtbf_s: float, *, total_s: float) -> float:
    """On average, on wall time."""
    return total_s / mtbf_s


def nodes_of(num_devices: int, *, devices_per_node: int) -> float:
    """A part of a node counts as that part: what fails are devices and what belongs to each."""
    return num_devices / devices_per_node


def per_node_day(mtbf_s: float, *, num_nodes: float) -> float:
    """The rate that a job of `num_nodes` with this mean time between failures implies."""
    return SECONDS_PER_DAY / (mtbf_s * num_nodes)


def poisson_quantile(probability: float, *, mean: float) -> int:
    """The smallest count that is not exceeded with at least `probability`. Above a mean of 400 by the normal approximation with its
    correction for skewness (Cornish and Fisher): off by one at most there."""
    if mean > 400.0:
        z = NormalDist().inv_cdf(probability)
        return max(0, math.ceil(mean + z * math.sqrt(mean) + (z * z - 1.0) / 6.0 - 0.5))
    term = total = math.exp(-mean)
    count = 0
    while total < probability and term > 0.0:
        count += 1
        term *= mean / count
        total += term
    return count


def poisson_band(mean: float) -> tuple[int, int]:
    """(2.5%, 97.5%) of a count."""
    return poisson_quantile(0.025, mean=mean), poisson_quantile(0.975, mean=mean)
