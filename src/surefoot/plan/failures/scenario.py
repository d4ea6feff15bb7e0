"""A run on failing machines, as the simulator is told it: nodes and their failures, tiers of checkpoints, restarts, spares. Pure.

The failure clock is stated, for it decides much where failures are frequent. On `wall` time nodes fail whether the job runs or not, and
each failure costs its whole restart, one after the other: the share lost is restart / mtbf. On `productive` time they fail only while the
job runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from surefoot.core.errors import ConfigError
from surefoot.plan.failures.interval import SECONDS_PER_DAY, daly_s
from surefoot.plan.failures.rates import llama_3_shares
from surefoot.plan.failures.spares import REPAIR_S

Grade = Literal["process", "node", "large_scale"]
Clock = Literal["wall", "productive"]
GRADES: tuple[Grade, ...] = ("process", "node", "large_scale")
CLOCKS: tuple[Clock, ...] = ("wall", "productive")

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

    After a failure: `detect_s`, the wait for a node where none is ready, `restart_s` of its grade, `restore_s` of the tier.
    """

    num_nodes: int
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
        return SECONDS_PER_DAY / (self.failures_per_node_day * self.num_nodes)

    def source_after(self, grade: Grade) -> Tier | None:
        """The tier with the newest whole copy after such a fault; None: back to the first step."""
        alive = [tier for tier in self.tiers if tier.survives(grade)]
        return min(alive, key=lambda tier: tier.every, default=None)

    @property
    def least_interval_s(self) -> float:
        """A tier must have its save before it gets the next."""
        return max([0.0, *(tier.write_s / tier.every - self.stall_s for tier in self.tiers)])


def best_interval_s(scenario: Scenario) -> float:
    """Daly's, where a fault of each grade loses half of as many intervals as lie between two saves of the tier that survives it."""
    weight = sum(share * (source.every if (source := scenario.source_after(grade)) else 1) for grade, share in scenario.shares.items())
    return max(daly_s(scenario.stall_s, scenario.mtbf_s / weight), scenario.least_interval_s, LEAST_INTERVAL_S)


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
    saving = 1.0 + scenario.stall_s / interval_s
    if scenario.clock == "productive":
        return max(0.0, 1.0 - work_s / scenario.mtbf_s) / saving / (1.0 + down_s / scenario.mtbf_s)
    return max(0.0, 1.0 - (down_s + work_s) / scenario.mtbf_s) / saving


def check_scenario(scenario: Scenario) -> None:
    """Raises ConfigError for the first thing that cannot be simulated."""
    above_zero = {"--gpus": scenario.num_nodes, "--days": scenario.total_s, "--failures-per-node-day": scenario.failures_per_node_day}
    at_least_zero = {"--stall-s": scenario.stall_s, "--detect-s": scenario.detect_s, "--repair-hours": scenario.repair_s}
    at_least_zero |= {f"--restart-s of {grade}": scenario.restart_s[grade] for grade in GRADES}
    at_least_zero |= {"--evict-after": scenario.lemons.evict_after, "--spares": scenario.num_spares or 0}
    above_zero["--lemon-factor"] = scenario.lemons.factor
    if scenario.interval_s is not None:
        above_zero["--interval-s"] = scenario.interval_s
    for names, least, words in ((above_zero, math.ulp(0.0), "above 0"), (at_least_zero, 0.0, "of 0 or more")):
        for option, value in names.items():
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{option} is {value:g}", where="simulate", hint=f"give a number {words}", got=value)
    share = scenario.lemons.share
    if not 0.0 <= share < 1.0:
        raise ConfigError(f"--lemon-share is {share:g}", where="simulate", hint="a share of the nodes, such as 0.02", got=share)
    if min(scenario.shares.values()) < 0 or abs(sum(scenario.shares.values()) - 1.0) > 1e-6:
        told = ", ".join(f"{grade} {share:g}" for grade, share in scenario.shares.items())
        raise ConfigError(f"shares of grades are {told}", where="--shares", hint="they are 0 or more and sum to 1")
    if not scenario.tiers:
        raise ConfigError("no tier holds a checkpoint", where="--tier", hint=f"name at least one of {', '.join(SURVIVES)}")
    if scenario.total_s / scenario.mtbf_s > MAX_FAILURES:
        raise ConfigError(
            f"{scenario.total_s / scenario.mtbf_s:.3g} failures in one run",
            where="simulate",
            hint=f"at most {MAX_FAILURES} are drawn: simulate fewer days",
            limit=MAX_FAILURES,
        )
