"""The answer of `surefoot simulate`, as one object and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from surefoot.core.units import show_duration
from surefoot.plan.failures.interval import daly_s, young_s
from surefoot.plan.failures.published_points import Outcome
from surefoot.plan.failures.rates import llama_3_shares
from surefoot.plan.failures.reasons import spares_reason
from surefoot.plan.failures.scenario import GRADES, LEAST_INTERVAL_S, SURVIVES, Scenario, first_order_share
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


def answer_of(scenario: Scenario, found: Simulated, *, rate_source: str, highest_rate: float) -> dict[str, Any]:
    """Everything by name; `classes` are shares of the wall time and sum to 1. Spares are told at the `highest_rate` of nodes like these."""
    spares = spares_for(highest_rate, num_nodes=scenario.num_nodes, node_share=scenario.shares["node"], repair_s=scenario.repair_s)
    reasons = {**_reasons(scenario, found, rate_source=rate_source), "spares": spares_reason(spares)}
    return {
        "scenario": asdict(scenario),
        "mtbf_s": scenario.mtbf_s,
        "interval_s": found.interval_s,
        "formulas": {"young_s": _young_s(scenario), "daly_s": daly_s(scenario.stall_s, scenario.mtbf_s / scenario.lag)},
        "failures": {"value": found.num_failures.value, "band": found.num_failures.band},
        "goodput": {"value": found.goodput.value, "band": found.goodput.band, "mean_band": found.mean_band, "edge_error": found.edge_error},
        "ettr": found.goodput.value,
        "classes": {name: share.value for name, share in found.classes.items()},
        "class_bands": {name: share.band for name, share in found.classes.items()},
        "closed_form": first_order_share(scenario),
        "num_runs": found.num_runs,
        "spares": asdict(spares),
        "reasons": {path: asdict(reason) for path, reason in reasons.items()},
    }


def page_of(answer: Mapping[str, Any], scenario: Scenario) -> list[str]:
    """For a terminal, with the reason of each number."""
    goodput, failures, reasons, formulas = answer["goodput"], answer["failures"], answer["reasons"], answer["formulas"]
    lines = [
        f"{scenario.num_nodes:.4g} nodes for {show_duration(scenario.total_s)}, drawn {answer['num_runs']} times",
        f"  goodput     {goodput['value']:.2%}   95% of runs {_band(goodput['band'])}   closed form {answer['closed_form']:.2%}",
        f"  failures    {failures['value']:.1f}   95% of runs {failures['band'][0]:.0f} to {failures['band'][1]:.0f}   "
        f"one in {show_duration(answer['mtbf_s'])}",
        f"  interval    {show_duration(answer['interval_s'])} of work between two saves   "
        f"Young {show_duration(formulas['young_s'])}, Daly {show_duration(formulas['daly_s'])}",
        f"  spares      {answer['spares']['num_nodes']} nodes are enough for {answer['spares']['probability']:.0%} of the time",
        "  where the time goes",
    ]
    low, high = goodput["band"]
    if not low <= goodput["value"] <= high:
        lines.insert(2, "              the mean is outside: fewer than one run in 40 loses much, which counts in the mean alone")
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
    shares = ", ".join(f"{grade} {scenario.shares[grade]:.0%}" for grade in GRADES)
    same = all(abs(scenario.shares[grade] - llama_3_shares()[grade]) < 1e-9 for grade in GRADES)
    return {
        "failures": Reason(f"{scenario.failures_per_node_day:.3g} per node and day", rate_source),
        "clock": Reason(clocks[scenario.clock], "stated, for it decides much where failures are frequent"),
        "grades": Reason(shares, "counts of arXiv 2407.21783, table 5" if same else "as given"),
        "tiers": Reason(tiers, "what a fault takes away"),
        "interval": _interval_reason(scenario, found.interval_s),
        "closed form": Reason("(1 - (restart + half an interval) / mtbf) / (1 + stall / interval)", "arXiv 2410.21680, first order"),
        "runs": Reason(
            f"{found.num_runs}: the edges of the band are known to {found.edge_error:.2%}, the mean to "
            f"{(found.mean_band[1] - found.mean_band[0]) / 2:.2%}",
            "seeded draws",
        ),
    }


def _interval_reason(scenario: Scenario, interval_s: float) -> Reason:
    wanted = scenario.interval_s
    if interval_s == wanted:
        return Reason("as given", "as given")
    if interval_s == scenario.least_interval_s:
        asked = f"{_young_s(scenario):.3g} s would be best" if wanted is None else f"{wanted:g} s was asked"
        return Reason(f"{asked}, but the next save must not begin before a tier has the last one", "--tier")
    if interval_s == LEAST_INTERVAL_S:
        return Reason(f"saves stand between whole steps: {_young_s(scenario):.3g} s would be best", "an assumption")
    if interval_s == scenario.total_s:
        return Reason(f"the whole run: {_young_s(scenario):.3g} s would be best", "Young, CACM 17(9), 1974")
    lag = f" / {scenario.lag:.3g}, for the tiers that survive lag" if scenario.lag != 1.0 else ""
    return Reason(f"sqrt(2 x {scenario.stall_s:g} s x {scenario.mtbf_s:.0f} s{lag})", "Young, CACM 17(9), 1974; Daly 2006 beside it")


def _young_s(scenario: Scenario) -> float:
    return young_s(scenario.stall_s, scenario.mtbf_s / scenario.lag)


def _band(band: tuple[float, float], quantity: str = "goodput") -> str:
    return f"{_value(band[0], quantity)} to {_value(band[1], quantity)}"


def _value(value: float, quantity: str) -> str:
    return f"{value:.1%}" if quantity == "goodput" else f"{value:.3g}"
