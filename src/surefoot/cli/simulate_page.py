"""The answer of `surefoot simulate`, as one object and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from surefoot.core.units import show_duration
from surefoot.plan.failures.published_points import Outcome
from surefoot.plan.failures.rates import llama_3_shares
from surefoot.plan.failures.scenario import GRADES, SURVIVES, Scenario, first_order_share, interval_of
from surefoot.plan.failures.simulation import Simulated
from surefoot.plan.failures.spares import spares_for
from surefoot.plan.records import Reason

_NAMES = {
    "productive": "useful",
    "saving": "blocked by saves",
    "lost_work": "lost work",
    "detecting": "detection",
    "waiting_for_node": "no node ready",
    "restarting": "restart",
    "restoring": "loading",
}


def answer_of(scenario: Scenario, found: Simulated, *, rate_source: str) -> dict[str, Any]:
    """Everything by name; `classes` are shares of the wall time and sum to 1."""
    return {
        "scenario": asdict(scenario),
        "mtbf_s": scenario.mtbf_s,
        "interval_s": found.interval_s,
        "failures": {"value": found.num_failures.value, "band": found.num_failures.band},
        "goodput": {"value": found.goodput.value, "band": found.goodput.band, "mean_band": found.mean_band, "edge_error": found.edge_error},
        "ettr": found.goodput.value,
        "classes": {name: share.value for name, share in found.classes.items()},
        "class_bands": {name: share.band for name, share in found.classes.items()},
        "closed_form": first_order_share(scenario),
        "num_runs": found.num_runs,
        "spares": _spares(scenario),
        "reasons": {path: asdict(reason) for path, reason in _reasons(scenario, found, rate_source=rate_source).items()},
    }


def page_of(answer: Mapping[str, Any], scenario: Scenario) -> list[str]:
    """For a terminal, with the reason of each number."""
    goodput, failures, reasons = answer["goodput"], answer["failures"], answer["reasons"]
    lines = [
        f"{scenario.num_nodes} nodes for {show_duration(scenario.total_s)}, drawn {answer['num_runs']} times",
        f"  goodput     {goodput['value']:.2%}   95% of runs {_band(goodput['band'])}   closed form {answer['closed_form']:.2%}",
        f"  failures    {failures['value']:.1f}   95% of runs {failures['band'][0]:.0f} to {failures['band'][1]:.0f}   "
        f"one in {show_duration(answer['mtbf_s'])}",
        f"  interval    {show_duration(answer['interval_s'])} of work between two saves",
        f"  spares      {answer['spares']['num_nodes']} nodes are enough for {answer['spares']['probability']:.0%} of the time",
        "  where the time goes",
    ]
    for name, share in answer["classes"].items():
        if share > 0.0:
            lines.append(f"    {_NAMES[name]:<18}{share:>8.2%}   {_band(answer['class_bands'][name])}")
    lines.append("  why")
    return lines + [f"    {path:<12} {reason['why']} ({reason['source']})" for path, reason in reasons.items()]


def outcome_lines(outcome: Outcome) -> list[str]:
    words = {True: "explained", False: "NOT explained", None: "cannot be judged"}
    lines = [f"{outcome.name}  {words[outcome.explained]}", f"  published   {outcome.published} ({outcome.source})"]
    if outcome.computed is not None:
        band = f"   95% of runs {_band(outcome.band, outcome.quantity)}" if outcome.band else ""
        lines.append(f"  computed    {outcome.quantity} {_value(outcome.computed, outcome.quantity)}{band}")
    return [*lines, f"  inputs      {outcome.inputs}", f"  note        {outcome.note}"]


def _reasons(scenario: Scenario, found: Simulated, *, rate_source: str) -> dict[str, Reason]:
    tiers = "; ".join(f"{tier.kind} survives {', '.join(SURVIVES[tier.kind])}" for tier in scenario.tiers)
    clocks = {
        "wall": "wall time: nodes fail while the job stands too, and each failure costs its whole restart, one after the other",
        "productive": "productive time: no node fails while the job stands",
    }
    wanted = scenario.interval_s
    if wanted is not None and interval_of(scenario) > wanted:
        interval = f"{wanted:g} s was asked, but the next save must not begin before a tier has the last one"
    else:
        interval = "as given" if wanted is not None else "the best: sqrt(2 x stall x mtbf), where a slower tier counts as often as it lags"
    shares = ", ".join(f"{grade} {scenario.shares[grade]:.0%}" for grade in GRADES)
    same = all(abs(scenario.shares[grade] - llama_3_shares()[grade]) < 1e-9 for grade in GRADES)
    return {
        "failures": Reason(f"{scenario.failures_per_node_day:.3g} per node and day", rate_source),
        "clock": Reason(clocks[scenario.clock], "stated, for it decides much where failures are frequent"),
        "grades": Reason(shares, "counts of arXiv 2407.21783, table 5" if same else "as given"),
        "tiers": Reason(tiers, "what a fault takes away"),
        "interval": Reason(interval, "Young 1974, Daly 2006" if wanted is None else "as given"),
        "closed form": Reason("(1 - (restart + half an interval) / mtbf) / (1 + stall / interval)", "arXiv 2410.21680, first order"),
        "runs": Reason(
            f"{found.num_runs}: the edges of the band are known to {found.edge_error:.2%}, the mean to "
            f"{(found.mean_band[1] - found.mean_band[0]) / 2:.2%}",
            "seeded draws",
        ),
    }


def _spares(scenario: Scenario) -> dict[str, float]:
    leaving = scenario.failures_per_node_day * scenario.num_nodes * scenario.shares["node"]
    return asdict(spares_for(leaving, repair_s=scenario.repair_s))


def _band(band: tuple[float, float], quantity: str = "goodput") -> str:
    return f"{_value(band[0], quantity)} to {_value(band[1], quantity)}"


def _value(value: float, quantity: str) -> str:
    return f"{value:.1%}" if quantity == "goodput" else f"{value:.3g}"
