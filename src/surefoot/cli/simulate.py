"""`surefoot simulate`: how much of a run's time stays useful on machines that fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from surefoot.cli.simulate_options import parse_restarts, parse_shares, parse_tier
from surefoot.core import strict_json
from surefoot.core.errors import ConfigError
from surefoot.plan.failures.interval import SECONDS_PER_DAY
from surefoot.plan.failures.rates import HIGHEST, LOWEST, nodes_of
from surefoot.plan.failures.scenario import Lemons, Scenario
from surefoot.plan.hardware import accelerator as accelerator_of

SCHEMA_VERSION = 1


def simulate(
    gpus: Annotated[int | None, typer.Option("--gpus", help="Devices that train together: a failure of one stops all.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Instead of --gpus: whole nodes.")] = None,
    days: Annotated[float, typer.Option("--days", help="Wall time of the run.")] = 30.0,
    accelerator: Annotated[str, typer.Option("--accelerator", help="Says how many devices a node has; a name or a TOML.")] = "h100",
    failures_per_node_day: Annotated[
        float | None, typer.Option("--failures-per-node-day", help="Unplanned interruptions [default: those of Llama 3].")
    ] = None,
    stall_s: Annotated[float, typer.Option("--stall-s", help="How long a save blocks training.")] = 1.0,
    interval_s: Annotated[float | None, typer.Option("--interval-s", help="Work between two saves [default: the best].")] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="KIND[:KEY=N,...]",
            help="memory, peer, local or shared, the fastest first; keys every, write_s, restore_s [default: memory, then shared].",
        ),
    ] = None,
    shares: Annotated[
        str, typer.Option("--shares", metavar="GRADE=P,...", help="Faults by process, node, large_scale [default: those of Llama 3].")
    ] = "",
    detect_s: Annotated[float, typer.Option("--detect-s", help="From a fault until it is known.")] = 60.0,
    restart_s: Annotated[str, typer.Option("--restart-s", help="From there until training goes on; one number, or by grade.")] = "840",
    spares: Annotated[int | None, typer.Option("--spares", help="Nodes held ready [default: always enough].")] = None,
    repair_hours: Annotated[float, typer.Option("--repair-hours", help="Of a node that was taken out, on average.")] = 24.0,
    lemon_share: Annotated[float, typer.Option("--lemon-share", help="Share of the nodes that fail more often.")] = 0.0,
    lemon_factor: Annotated[float, typer.Option("--lemon-factor", help="How many times as often.")] = 10.0,
    evict_after: Annotated[int, typer.Option("--evict-after", help="Failures of a lemon after which it goes for good; 0 is never.")] = 0,
    failure_clock: Annotated[
        Literal["wall", "productive"], typer.Option("--failure-clock", help="Whether nodes fail while the job stands, too.")
    ] = "wall",
    point: Annotated[str, typer.Option("--point", metavar="NAME|all", help="Published runs, beside what the simulator says of them.")] = "",
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.", min=0)] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how much of a run's time stays useful on machines that fail, and where the rest goes.

    \b
    Examples:
      surefoot simulate --gpus 1000 --days 30
      surefoot simulate --gpus 16384 --days 54 --stall-s 10 --tier memory --tier shared:every=4,write_s=120,restore_s=60
      surefoot simulate --point all
    """
    if point:
        _points(point, seed=seed, json_output=json_output)
        return
    if (gpus is None) == (nodes is None):
        what = "nothing says how many devices train" if gpus is None else "--gpus and --nodes say the same thing twice"
        raise ConfigError(what, where="--gpus", hint="surefoot simulate --gpus 1000 --days 30")
    per_node = accelerator_of(accelerator).devices_per_node
    scenario = Scenario(
        num_nodes=nodes_of(gpus, devices_per_node=per_node) if gpus is not None else nodes or 0,
        total_s=days * SECONDS_PER_DAY,
        failures_per_node_day=LOWEST.on_nodes_of(per_node) if failures_per_node_day is None else failures_per_node_day,
        stall_s=stall_s,
        interval_s=interval_s,
        detect_s=detect_s,
        restart_s=parse_restarts(restart_s),
        num_spares=spares,
        repair_s=repair_hours * 3600.0,
        lemons=Lemons(lemon_share, lemon_factor, evict_after),
        clock=failure_clock,
    )
    if tier:
        scenario = replace(scenario, tiers=tuple(parse_tier(text) for text in tier))
    if shares:
        scenario = replace(scenario, shares=parse_shares(shares))
    highest = HIGHEST.on_nodes_of(per_node) if failures_per_node_day is None else failures_per_node_day
    source = LOWEST.source if failures_per_node_day is None else "as given"
    _print_scenario(scenario, rate_source=source, highest_rate=highest, seed=seed, json_output=json_output)


def _print_scenario(scenario: Scenario, *, rate_source: str, highest_rate: float, seed: int, json_output: bool) -> None:
    from surefoot.cli.simulate_page import answer_of, page_of
    from surefoot.plan.failures.simulation import simulate as drawn

    answer = answer_of(scenario, drawn(scenario, seed=seed), rate_source=rate_source, highest_rate=highest_rate)
    typer.echo(strict_json.dumps({"schema_version": SCHEMA_VERSION, **answer}) if json_output else "\n".join(page_of(answer, scenario)))


def _points(point: str, *, seed: int, json_output: bool) -> None:
    from surefoot.cli.simulate_page import outcome_lines
    from surefoot.plan.failures.published_points import POINTS, outcome_of

    outcomes = [outcome_of(name, seed=seed) for name in (POINTS if point == "all" else (point,))]
    if json_output:
        typer.echo(strict_json.dumps({"schema_version": SCHEMA_VERSION, "points": outcomes}))
        return
    typer.echo("\n".join(line for outcome in outcomes for line in outcome_lines(outcome)))
