"""A run on failing machines, as the simulator is told it: nodes and their failures, tiers of checkpoints, restarts, spares. Pure.

The failure clock is stated, for it decides much where failures are frequent. On `wall` time nodes fail whether the job runs or not, and
each failure costs its whole restart, one after the other: the share lost is restart / mtbf. On `productive` time they fail only while the
job runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from surefoot.core.errors import ConfigError
from surefoot.plan.failures import interval as formulas
from surefoot.plan.failures.rates import llama_3_shares
from surefoot.plan.failures.spares import REPAIR_S

Grade = Literal["process", "node", "large_scale"]
Clock = Literal["wall", "productive"]
GRADES: tuple[Grade, ...] = ("process", "node", "large_scale")

SURVIVES: Mapping[str, tuple[Grade, ...]] = {
    "memory": ("process",),
    "peer": ("process", "node"),
    "local": ("process",),
    "shared": ("process", "node", "large_scale"),
}
"""What each kind of tier is still whole after. Host memory goes with its host, a local disk with the node that is replaced; copies in the
memory of other nodes survive one node (Gemini, SOSP 2023), but not a switch or a row without power; a shared store survives all."""

MAX_FAILURES = 20_000
"""Of one run, on average: drawn in seconds."""

LEAST_RATE, MAX_S = 1e-12, 1e12
MAX_NODES = 10_000_000
MAX_SPARES = 1_000
MAX_EVICT_AFTER = 100
MAX_LEMON_FACTOR = 1e6
"""Of what is asked: figures stay finite, and what is kept for each run that is drawn stays small. A spare more than that is never used."""

LEAST_INTERVAL_S = 1.0
"""Saves stand between whole steps, even where they cost nothing."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Every `every`-th save reaches it, whole `write_s` after the save; loading from it takes `restore_s`."""

    kind: str
    every: int = 1
    write_s: float = 0.0
    restore_s: float = 0.0

    def survives(self, grade: Grade) -> bool:
        return grade in SURVIVES[self.kind]


@dataclass(frozen=True, slots=True)
class Lemons:
    """`share` of the nodes fail `factor` times as often as the others; one goes for good after `evict_after` failures (0: never). The
    scenario's rate is the mean over all nodes, them included."""

    share: float = 0.0
    factor: float = 1.0
    evict_after: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """`interval_s` None: the best one. `tiers` from the fastest to the safest. `num_spares` None: always enough.

    A node of which the job has a part fails as that part. After a failure: `detect_s`, the wait for a node where none is ready, `restart_s`
    of its grade, `restore_s` of the tier.
    """

    num_nodes: float
    total_s: float
    failures_per_node_day: float
    stall_s: float = 1.0
    interval_s: float | None = None
    tiers: tuple[Tier, ...] = (Tier("memory"), Tier("shared"))
    shares: Mapping[Grade, float] = field(default_factory=lambda: {grade: llama_3_shares()[grade] for grade in GRADES})
    detect_s: float = 0.0
    restart_s: Mapping[Grade, float] = field(default_factory=lambda: dict.fromkeys(GRADES, 900.0))
    num_spares: int | None = None
    repair_s: float = REPAIR_S
    lemons: Lemons = Lemons()
    clock: Clock = "wall"

    @property
    def mtbf_s(self) -> float:
        return formulas.mtbf_s(self.failures_per_node_day, num_nodes=self.num_nodes)

    @property
    def num_hosts(self) -> int:
        """Nodes that the job is on, whole or in part."""
        return math.ceil(self.num_nodes)

    @property
    def lag(self) -> float:
        """Intervals of which half is lost with a failure: as many as lie between two saves of the tier that survives it, on average."""
        return sum(share * (source.every if (source := self.source_after(grade)) else 1) for grade, share in self.shares.items())

    def source_after(self, grade: Grade) -> Tier | None:
        """The tier with the newest whole copy after such a fault; None: back to the first step."""
        alive = [tier for tier in self.tiers if tier.survives(grade)]
        return min(alive, key=lambda tier: tier.every, default=None)

    @property
    def least_interval_s(self) -> float:
        """A tier must have its save before it gets the next."""
        return max([0.0, *(tier.write_s / tier.every - self.stall_s for tier in self.tiers)])


def best_interval_s(scenario: Scenario) -> float:
    """Young's, as a plan's, each failure counted as often as the tier that survives it lags."""
    return max(formulas.young_s(scenario.stall_s, scenario.mtbf_s / scenario.lag), scenario.least_interval_s, LEAST_INTERVAL_S)


def interval_of(scenario: Scenario) -> float:
    """Work between two saves: as given, but never sooner than a save is written."""
    if scenario.interval_s is None:
        return min(best_interval_s(scenario), scenario.total_s)
    return max(scenario.interval_s, scenario.least_interval_s)


def first_order_share(scenario: Scenario) -> float:
    """Meta's closed form (arXiv 2410.21680) with tiers and grades: what is lost with a failure, times how often one comes. On the clock of
    the scenario; spares, lemons and a fault during a restart are left out."""
    interval_s = interval_of(scenario)
    down_s = work_s = 0.0
    for grade, share in scenario.shares.items():
        source = scenario.source_after(grade)
        down_s += share * (scenario.detect_s + scenario.restart_s[grade] + (source.restore_s if source else 0.0))
        work_s += share * (source.every * interval_s / 2.0 + source.write_s if source else scenario.total_s / 2.0)
    on_wall = scenario.clock == "wall"
    kept = formulas.kept_share(
        interval_s, stall_s=scenario.stall_s, mtbf_s=scenario.mtbf_s, restart_s=down_s if on_wall else 0.0, lost_s=work_s
    )
    return kept if on_wall else kept / (1.0 + down_s / scenario.mtbf_s)


def check_scenario(scenario: Scenario) -> None:
    """Raises ConfigError for the first thing that cannot be simulated."""
    for option, value, least, most in _bounds(scenario):
        if not (math.isfinite(value) and least <= value <= most):
            words = "above 0" if least > 0 else "of 0 or more"
            upper = f", at most {most:g}" if math.isfinite(most) else ""
            raise ConfigError(f"{option} is {value:g}", where="simulate", hint=f"give a number {words}{upper}", got=value)
    _check_shares(scenario)
    if not scenario.tiers:
        raise ConfigError("no tier holds a checkpoint", where="--tier", hint=f"name at least one of {', '.join(SURVIVES)}")
    if scenario.total_s > MAX_FAILURES * scenario.mtbf_s:
        raise ConfigError(
            f"{scenario.total_s / scenario.mtbf_s:.3g} failures in one run",
            where="simulate",
            hint=f"at most {MAX_FAILURES} are drawn: simulate fewer days",
            limit=MAX_FAILURES,
        )


def _bounds(scenario: Scenario) -> Iterator[tuple[str, float, float, float]]:
    """Option, value, least and most."""
    above_zero, lemons = math.ulp(0.0), scenario.lemons
    yield "--gpus", scenario.num_nodes, above_zero, MAX_NODES
    yield "--days", scenario.total_s, above_zero, MAX_S
    yield "--failures-per-node-day", scenario.failures_per_node_day, LEAST_RATE, math.inf
    yield "--stall-s", scenario.stall_s, 0.0, MAX_S
    yield "--detect-s", scenario.detect_s, 0.0, MAX_S
    yield "--repair-hours", scenario.repair_s, 0.0, MAX_S
    for grade in GRADES:
        yield f"--restart-s of {grade}", scenario.restart_s[grade], 0.0, MAX_S
    for tier in scenario.tiers:
        yield f"write_s of --tier {tier.kind}", tier.write_s, 0.0, MAX_S
        yield f"restore_s of --tier {tier.kind}", tier.restore_s, 0.0, MAX_S
    yield "--spares", scenario.num_spares or 0, 0.0, MAX_SPARES
    yield "--evict-after", lemons.evict_after, 0.0, MAX_EVICT_AFTER
    yield "--lemon-factor", lemons.factor, above_zero, MAX_LEMON_FACTOR
    if scenario.interval_s is not None:
        yield "--interval-s", scenario.interval_s, above_zero, MAX_S


def _check_shares(scenario: Scenario) -> None:
    share, evict_after = scenario.lemons.share, scenario.lemons.evict_after
    if not 0.0 <= share < 1.0:
        raise ConfigError(f"--lemon-share is {share:g}", where="simulate", hint="a share of the nodes, such as 0.02", got=share)
    if evict_after and not share:
        raise ConfigError(
            f"--evict-after {evict_after} without lemons",
            where="simulate",
            hint="say how many of the nodes: --lemon-share 0.02",
        )
    if min(scenario.shares.values()) < 0 or abs(sum(scenario.shares.values()) - 1.0) > 1e-6:
        told = ", ".join(f"{grade} {share:g}" for grade, share in scenario.shares.items())
        raise ConfigError(f"shares of grades are {told}", where="--shares", hint="they are 0 or more and sum to 1")
