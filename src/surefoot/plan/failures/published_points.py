"""What was published of real runs, and what the simulator says of the same inputs. Pure.

Where inputs were not published they are assumed and said so. A point is `explained` when the model's figure agrees; those that failures of
nodes do not explain stay here as such: a model that was fitted to them would be wrong elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.plan.failures.interval import SECONDS_PER_DAY, mtbf_s
from surefoot.plan.failures.rates import LLAMA_3, RSC_1, per_node_day
from surefoot.plan.failures.scenario import GRADES, Scenario, Tier
from surefoot.plan.failures.simulation import Share, Simulated, simulate

HOUR_S = 3600.0
RATE_TOLERANCE = 0.03
_SHARED = (Tier("shared"),)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`computed` and its 95% `band` of the published `quantity`; `explained` None where the inputs were never published."""

    name: str
    quantity: str
    published: str
    computed: float | None
    band: tuple[float, float] | None
    explained: bool | None
    inputs: str
    note: str
    source: str
    more: Mapping[str, Any] = field(default_factory=dict)


def _restarts(seconds: float) -> dict[Any, float]:
    return dict.fromkeys(GRADES, seconds)


def _projection(name: str, *, num_nodes: int, published_h: float, text: str) -> Outcome:
    hours = mtbf_s(RSC_1.per_node_day, num_nodes=num_nodes) / HOUR_S
    implied = per_node_day(published_h * HOUR_S, num_nodes=num_nodes)
    explained = abs(hours / published_h - 1.0) <= RATE_TOLERANCE
    note = (
        "the rate of the fleet, times nodes"
        if explained
        else f"not explained by node failures: {implied:.3g} per node and day would be {implied / RSC_1.per_node_day:.1f} times "
        "the fleet's rate, so jobs of this size end for other reasons too"
    )
    return Outcome(
        name, "mtbf_h", text, hours, None, explained, f"{RSC_1.per_node_day:g} per node and day, {num_nodes} nodes", note, RSC_1.source
    )


def _rsc_1024_gpus(seed: int) -> Outcome:
    return _projection("rsc-1024-gpus", num_nodes=128, published_h=7.9, text="7.9 h measured")


def _rsc_16384_gpus(seed: int) -> Outcome:
    return _projection("rsc-16384-gpus", num_nodes=2048, published_h=1.8, text="1.8 h projected")


def _rsc_131072_gpus(seed: int) -> Outcome:
    return _projection("rsc-131072-gpus", num_nodes=16_384, published_h=0.23, text="0.23 h projected")


def _llama_3(seed: int) -> Outcome:
    base = Scenario(2048, 54 * SECONDS_PER_DAY, LLAMA_3.per_node_day, stall_s=20.0, tiers=_SHARED, restart_s=_restarts(300.0))
    found = simulate(base, seed=seed)
    others = [(5.0, 300.0), (20.0, 600.0), (60.0, 120.0)]
    variants = [(w, r, simulate(replace(base, stall_s=w, restart_s=_restarts(r)), seed=seed).goodput) for w, r in others]
    told = "; ".join(f"{w:g} s and {r / 60:g} min: {share.value:.1%}" for w, r, share in variants)
    return Outcome(
        name="llama-3",
        quantity="goodput",
        published="above 90%, 419 unexpected interruptions in 54 days",
        computed=found.goodput.value,
        band=found.goodput.band,
        explained=found.goodput.band[0] > 0.90 and found.num_failures.band[0] <= 419 <= found.num_failures.band[1],
        inputs="2,048 nodes, a save blocks 20 s, a restart takes 5 min (both assumed), the best interval",
        note=f"what the 90% leave room for, by stall and restart: {told}",
        source=LLAMA_3.source,
        more={
            "failures": found.num_failures,
            "variants": [{"stall_s": w, "restart_s": r, "goodput": share.value, "band": share.band} for w, r, share in variants],
        },
    )


def _ft_hsdp(seed: int) -> Outcome:
    base = Scenario(
        12_500, 30 * SECONDS_PER_DAY, RSC_1.per_node_day, stall_s=0.01, interval_s=10.0, tiers=_SHARED, restart_s=_restarts(600.0)
    )
    found = simulate(base, seed=seed)
    other = simulate(replace(base, clock="productive"), seed=seed)
    shorter = simulate(replace(base, restart_s=_restarts(180.0)), seed=seed)
    return Outcome(
        name="ft-hsdp",
        quantity="goodput",
        published="44% of the time is effective when all train in step",
        computed=found.goodput.value,
        band=found.goodput.band,
        explained=_inside(found.goodput, 0.44),
        inputs=f"12,500 nodes at {RSC_1.per_node_day:g} per node and day, each failure stops all for 10 min, nothing else is lost",
        note=f"on wall time 1 - 10 min / {base.mtbf_s / 60:.1f} min; were nodes safe while the job stands, {other.goodput.value:.0%}. With "
        f"stalls of 3 min {shorter.goodput.value:.0%}, where 80% are published of replicas that go on alone",
        source="FT-HSDP, arXiv 2602.00277",
    )


def _byterobust(seed: int) -> Outcome:
    nodes, share = 1200, 0.97
    lost_min = [(1.0 - share) * mtbf_s(rate, num_nodes=nodes) / 60.0 for rate in (RSC_1.per_node_day, LLAMA_3.per_node_day)]
    rate = (RSC_1.per_node_day * LLAMA_3.per_node_day) ** 0.5
    restart_s = (1.0 - share) * mtbf_s(rate, num_nodes=nodes)
    found = simulate(
        Scenario(nodes, 90 * SECONDS_PER_DAY, rate, stall_s=0.01, interval_s=10.0, tiers=_SHARED, restart_s=_restarts(restart_s)), seed=seed
    )
    return Outcome(
        name="byterobust",
        quantity="goodput",
        published="97% over three months on 9,600 devices",
        computed=found.goodput.value,
        band=found.goodput.band,
        explained=_inside(found.goodput, share),
        inputs=f"1,200 nodes at {rate:.3g} per node and day, {restart_s / 60:.1f} min lost with each failure: solved for, not published",
        note=f"97% leave {lost_min[0]:.1f} to {lost_min[1]:.1f} min a failure, detection, restart and lost work together",
        source="arXiv 2509.16293",
        more={"lost_minutes_per_failure": lost_min},
    )


def _gemini(seed: int) -> Outcome:
    slow = Scenario(
        500,
        30 * SECONDS_PER_DAY,
        RSC_1.per_node_day,
        stall_s=30.0,
        interval_s=HOUR_S,
        tiers=(Tier("shared", restore_s=900.0),),
        shares={"process": 0.25, "node": 0.75, "large_scale": 0.0},
        restart_s=_restarts(600.0),
    )
    before = simulate(slow, seed=seed).goodput
    after = simulate(replace(slow, tiers=(Tier("peer"), Tier("shared", restore_s=900.0)), stall_s=0.1, interval_s=60.0), seed=seed).goodput
    return Outcome(
        name="gemini",
        quantity="goodput",
        published="85% to 97% by copies in the memory of other nodes",
        computed=after.value,
        band=after.band,
        explained=None,
        inputs="500 nodes, restart 10 min; saves each hour to a store, 15 min to load; then each minute to peers (all assumed)",
        note=f"shape alone, for no inputs were published: {before.value:.0%} to {after.value:.0%}; half an interval and the load go, the "
        "restart stays",
        source="Gemini 1.0, arXiv 2312.11805",
        more={"before": before.value},
    )


def _bloom(seed: int) -> Outcome:
    rates = [count / 7.0 / 48 for count in (1.0, 2.0)]
    plain = Scenario(48, 110 * SECONDS_PER_DAY, rates[0], stall_s=40.0, interval_s=3 * HOUR_S, tiers=_SHARED)
    found = [simulate(replace(plain, failures_per_node_day=rate), seed=seed) for rate in rates]
    lost_h = [_lost_per_failure_h(one, total_s=plain.total_s) for one in found]
    shares = [one.classes["lost_work"].value for one in found]
    return Outcome(
        name="bloom",
        quantity="lost_work_h_per_failure",
        published="1 to 2 failures a week, a save each 3 h, so 1.5 h lost with each",
        computed=sum(lost_h) / 2,
        band=None,
        explained=all(abs(hours / 1.5 - 1.0) < 0.05 for hours in lost_h),
        inputs=f"48 nodes at {rates[0]:.2g} to {rates[1]:.2g} per node and day, interval 3 h",
        note=f"computed again: {shares[0]:.1%} to {shares[1]:.1%} of the time",
        source="BLOOM, arXiv 2211.05100",
        more={"lost_work": shares},
    )


def _opt(seed: int) -> Outcome:
    days, counted = 60.0, 105
    plain = Scenario(124, days * SECONDS_PER_DAY, RSC_1.per_node_day, tiers=_SHARED)
    found = simulate(plain, seed=seed).num_failures
    implied = counted / days / 124
    return Outcome(
        name="opt-175b",
        quantity="failures",
        published=f"35 restarts by hand and more than 70 by themselves in about {days:g} days",
        computed=found.value,
        band=found.band,
        explained=_inside(found, counted),
        inputs=f"124 nodes at {RSC_1.per_node_day:g} per node and day",
        note=f"not explained by the rate of a settled fleet: {implied:.2g} per node and day is {implied / RSC_1.per_node_day:.1f} times "
        "as much; a young fleet with nodes that fail again and again, and stops for the loss are among them",
        source="OPT, arXiv 2205.01068",
    )


def _palm(seed: int) -> Outcome:
    return Outcome(
        name="palm",
        quantity="rollbacks",
        published="about 20 loss spikes, each rewound by 100 steps and 200 to 500 batches skipped",
        computed=None,
        band=None,
        explained=None,
        inputs="none",
        note="numeric restarts are a class of their own: they come with the loss, not with the nodes, and are not simulated",
        source="PaLM, arXiv 2204.02311",
    )


def _glm(seed: int) -> Outcome:
    return Outcome(
        name="dlrover-glm-65b",
        quantity="goodput",
        published="69% to 95% on more than 1,000 devices",
        computed=None,
        band=None,
        explained=None,
        inputs="none",
        note="neither rate nor interval nor restart was published, so nothing can be computed again",
        source="DLRover, github.com/intelligent-machine-learning/dlrover",
    )


POINTS: Mapping[str, Callable[[int], Outcome]] = {
    "rsc-16384-gpus": _rsc_16384_gpus,
    "rsc-131072-gpus": _rsc_131072_gpus,
    "rsc-1024-gpus": _rsc_1024_gpus,
    "llama-3": _llama_3,
    "ft-hsdp": _ft_hsdp,
    "byterobust": _byterobust,
    "gemini": _gemini,
    "bloom": _bloom,
    "opt-175b": _opt,
    "palm": _palm,
    "dlrover-glm-65b": _glm,
}


def outcome_of(name: str, *, seed: int = 0) -> Outcome:
    """Raises ConfigError that lists what there is."""
    if name not in POINTS:
        raise ConfigError(f"no published point is called {name!r}", where="--point", hint=f"all, or one of {', '.join(POINTS)}", got=name)
    return POINTS[name](seed)


def _inside(share: Share, value: float) -> bool:
    return share.band[0] <= value <= share.band[1]


def _lost_per_failure_h(found: Simulated, *, total_s: float) -> float:
    return found.classes["lost_work"].value * total_s / found.num_failures.value / HOUR_S
