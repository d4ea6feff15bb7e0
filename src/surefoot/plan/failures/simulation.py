"""Monte-Carlo of a run on failing machines: where its wall time goes, in classes that add up to it. Seeded, vectorised over runs.

Failures are drawn one after the other, for all runs at once. Between two failures the state of a run is arithmetic: the job is up from
`ready_s` on, works for an interval, is blocked by a save, and so on; save number k holds k intervals of work. A failure finds the newest
save that survives its grade; the work since then is lost. A copy that was still being written when the failure came is no save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.plan.failures.scenario import GRADES, Scenario, check_scenario, interval_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLASSES = ("productive", "saving", "lost_work", "detecting", "waiting_for_node", "restarting", "restoring")
"""Of wall time. `productive` is work that the run keeps; what it computed and lost is `lost_work`, so recomputing counts as productive."""

BATCH = 250
MAX_RUNS = 10_000
MAX_DRAWN = 5_000_000
"""Failures in all runs together, in seconds; one batch is always drawn."""

EDGE_TOLERANCE = 0.0025
"""Standard error that the edges of the 95% band may have, as a share of the time: a quarter of a point."""

_EDGE_ERROR = math.sqrt(0.025 * 0.975) / 0.0584
"""Standard error of a 2.5% quantile of n normal draws, in sd / sqrt(n); 0.0584 is their density there."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of the wall time: mean over runs, and the band that holds 95% of them."""

    value: float
    band: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Simulated:
    """`classes` sum to 1. `goodput` is the share of `productive`; its mean is known to `mean_band` (95%), its band's edges to a standard
    error of `edge_error`."""

    goodput: Share
    mean_band: tuple[float, float]
    edge_error: float
    classes: dict[str, Share]
    num_failures: Share
    num_runs: int
    interval_s: float


@dataclass(slots=True)
class _Runs:
    """One element, row or column per run. `start` is the save a run went on from, `newest` [tier, run] the newest whole one, -1 for none.

    `free_s` [run, spare] is when each spare is ready. `lemons` [run, k] counts those in the job that have failed k times.
    """

    next_s: Floats
    ready_s: Floats
    start: Floats
    newest: Floats
    spent_s: dict[str, Floats]
    num_failures: Floats
    free_s: Floats
    lemons: Floats


def simulate(scenario: Scenario, *, seed: int = 0) -> Simulated:
    """As many runs as narrow the band's edges to a quarter of a point, if seconds suffice. Raises ConfigError for what cannot be drawn."""
    check_scenario(scenario)
    generator = np.random.default_rng(seed)
    batches: list[_Runs] = []
    num_runs = 0
    most = min(MAX_RUNS, MAX_DRAWN * scenario.mtbf_s / scenario.total_s)
    while True:
        batches.append(_draw(scenario, BATCH, generator))
        num_runs += BATCH
        productive = _joined([runs.spent_s["productive"] for runs in batches]) / scenario.total_s
        edge_error = _EDGE_ERROR * float(productive.std()) / math.sqrt(num_runs)
        if edge_error <= EDGE_TOLERANCE or num_runs >= most:
            break
    error = 1.96 * float(productive.std()) / math.sqrt(num_runs)
    mean = float(productive.mean())
    return Simulated(
        goodput=_share(productive),
        mean_band=(mean - error, mean + error),
        edge_error=edge_error,
        classes={name: _share(_joined([runs.spent_s[name] for runs in batches]) / scenario.total_s) for name in CLASSES},
        num_failures=_share(_joined([runs.num_failures for runs in batches])),
        num_runs=num_runs,
        interval_s=interval_of(scenario),
    )


def _share(values: Floats) -> Share:
    low, high = np.quantile(values, (0.025, 0.975))
    return Share(float(values.mean()), (float(low), float(high)))


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate(parts)


def _draw(scenario: Scenario, num_runs: int, generator: np.random.Generator) -> _Runs:
    lemons = np.zeros((num_runs, max(1, scenario.lemons.evict_after)))
    lemons[:, 0] = generator.binomial(scenario.num_hosts, scenario.lemons.share, num_runs)
    zeros = np.zeros(num_runs)
    runs = _Runs(
        next_s=zeros.copy(),
        ready_s=zeros.copy(),
        start=zeros.copy(),
        newest=np.zeros((len(scenario.tiers), num_runs)),
        spent_s={name: zeros.copy() for name in CLASSES},
        num_failures=zeros.copy(),
        free_s=np.zeros((num_runs, scenario.num_spares or 0)),
        lemons=lemons,
    )
    everyone = np.arange(num_runs)
    runs.next_s = _until_next(scenario, runs, everyone, generator)
    while len(who := np.flatnonzero(runs.next_s < scenario.total_s)):
        _fail(scenario, runs, who, generator)
    _work(scenario, runs, everyone, until_s=np.full(num_runs, scenario.total_s))
    return runs


def _fail(scenario: Scenario, runs: _Runs, who: Ints, generator: np.random.Generator) -> None:
    """One failure of each of the runs `who`, at its `next_s`, until its job is up again."""
    failed_s = runs.next_s[who]
    runs.num_failures[who] += 1
    grades = np.searchsorted(np.cumsum([scenario.shares[grade] for grade in GRADES])[:-1], generator.random(len(who)), side="right")
    done_s = _work(scenario, runs, who, until_s=failed_s)
    restore_s = _go_back(scenario, runs, who, grades, done_s=done_s)
    begun_s = np.maximum(failed_s, runs.ready_s[who])
    found_s = begun_s + scenario.detect_s
    wait_s = np.zeros(len(who))
    takes_node = np.flatnonzero(grades == GRADES.index("node"))
    wait_s[takes_node] = _replace_node(scenario, runs, who[takes_node], generator, found_s=found_s[takes_node])
    restart_s = np.array([scenario.restart_s[grade] for grade in GRADES])[grades]
    at_s = begun_s
    for name, duration_s in (
        ("detecting", np.full(len(who), scenario.detect_s)),
        ("waiting_for_node", wait_s),
        ("restarting", restart_s),
        ("restoring", restore_s),
    ):
        runs.spent_s[name][who] += np.clip(scenario.total_s - at_s, 0.0, duration_s)
        at_s = at_s + duration_s
    runs.ready_s[who] = at_s
    _judge_lemons(scenario, runs, who, generator)
    clock_s = failed_s if scenario.clock == "wall" else at_s
    runs.next_s[who] = clock_s + _until_next(scenario, runs, who, generator)


def _work(scenario: Scenario, runs: _Runs, who: Ints, *, until_s: Floats) -> Floats:
    """Let the jobs run from `ready_s` until then, note the saves that became whole; the work done since `ready_s`."""
    interval_s = interval_of(scenario)
    cycle_s = interval_s + scenario.stall_s
    up_s = np.maximum(0.0, until_s - runs.ready_s[who])
    num_saves = np.floor(up_s / cycle_s)
    rest_s = up_s - num_saves * cycle_s
    work_s = num_saves * interval_s + np.minimum(rest_s, interval_s)
    runs.spent_s["productive"][who] += work_s
    runs.spent_s["saving"][who] += up_s - work_s
    for index, tier in enumerate(scenario.tiers):
        written = np.maximum(0.0, np.floor((up_s - tier.write_s) / cycle_s))
        newest = np.floor((runs.start[who] + written) / tier.every) * tier.every
        runs.newest[index, who] = np.where(newest > runs.start[who], newest, runs.newest[index, who])
    return work_s


def _go_back(scenario: Scenario, runs: _Runs, who: Ints, grades: Ints, *, done_s: Floats) -> Floats:
    """To the newest save that survives; seconds that loading it takes. What was worked since then moves to `lost_work`."""
    interval_s = interval_of(scenario)
    survives = np.array([[tier.survives(grade) for grade in GRADES] for tier in scenario.tiers])
    left = np.where(survives[:, grades], runs.newest[:, who], -1.0)
    source = left.argmax(axis=0)
    resumed = np.maximum(0.0, left.max(axis=0))
    lost_s = runs.start[who] * interval_s + done_s - resumed * interval_s
    runs.spent_s["productive"][who] -= lost_s
    runs.spent_s["lost_work"][who] += lost_s
    runs.newest[:, who] = left
    runs.start[who] = resumed
    restore_s = np.array([tier.restore_s for tier in scenario.tiers])[source]
    return np.where(left.max(axis=0) > 0.0, restore_s, 0.0)


def _replace_node(scenario: Scenario, runs: _Runs, who: Ints, generator: np.random.Generator, *, found_s: Floats) -> Floats:
    """Seconds until another node is there; the broken one is a spare again after its repair, of exponential length."""
    if scenario.num_spares is None or not len(who):
        return np.zeros(len(who))
    repaired_s: Floats = found_s + generator.exponential(1.0, len(who)) * scenario.repair_s
    if scenario.num_spares == 0:
        return repaired_s - found_s
    free_s = runs.free_s[who]
    first = np.minimum(free_s.min(axis=1), repaired_s)
    which = free_s.argmin(axis=1)
    runs.free_s[who, which] = np.maximum(free_s[np.arange(len(who)), which], repaired_s)
    waited_s: Floats = np.maximum(0.0, first - found_s)
    return waited_s


def _rate_per_s(scenario: Scenario, runs: _Runs, who: Ints) -> tuple[Floats, Floats]:
    """Of all nodes of each job, and of its lemons alone."""
    lemons = scenario.lemons
    usual = 1.0 / (scenario.mtbf_s * scenario.num_hosts * (1.0 - lemons.share + lemons.share * lemons.factor))
    num_lemons = runs.lemons[who].sum(axis=1)
    of_lemons = usual * lemons.factor * num_lemons
    return usual * (scenario.num_hosts - num_lemons) + of_lemons, of_lemons


def _until_next(scenario: Scenario, runs: _Runs, who: Ints, generator: np.random.Generator) -> Floats:
    return generator.exponential(1.0, len(who)) / _rate_per_s(scenario, runs, who)[0]


def _judge_lemons(scenario: Scenario, runs: _Runs, who: Ints, generator: np.random.Generator) -> None:
    """Whether the failure was a lemon's, and of one that has failed how often; one that has failed too often leaves for good."""
    if not scenario.lemons.evict_after or not scenario.lemons.share:
        return
    total, of_lemons = _rate_per_s(scenario, runs, who)
    hit = who[generator.random(len(who)) * total < of_lemons]
    counted = runs.lemons[hit]
    place = generator.random(len(hit)) * counted.sum(axis=1)
    age = (counted.cumsum(axis=1) <= place[:, None]).sum(axis=1)
    runs.lemons[hit, age] -= 1
    stays = age + 1 < scenario.lemons.evict_after
    runs.lemons[hit[stays], age[stays] + 1] += 1
