"""`surefoot calibrate`: how often the detectors are wrong on a run that went well, and how soon they see a fault."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.monitor.calibrate import Calibrated, Calibration

SCHEMA_VERSION = 1


def calibrate(
    table: Annotated[Path, typer.Argument(metavar="TABLE|RUN", help="CSV or Parquet with step, loss[, grad_norm]; or a run folder.")],
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", min=0, help="Alarms before it count as none that are false [default: 1000, or a third of the table]."),
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0.0, help="False alarms per 10,000 rows that all suggested thresholds together may have.")
    ] = 0.5,
    places: Annotated[int, typer.Option("--places", min=0, help="How many places each fault is put into.")] = 12,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the places that faults are put into.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how often each detector is wrong on a run that went well, how soon it sees a fault, and which threshold would do.

    The detectors are those of training, by the settings of the run folder, or by default. Alarms within 100 steps are one. The series is
    taken to be healthy from --from-step on: leave out what was not, or read its alarms as what they are.

    \b
    Examples:
      surefoot calibrate losses.csv
      surefoot calibrate runs/quickstart --json
      surefoot calibrate losses.csv --from-step 2000 --budget 1
    """
    from surefoot.cli.calibrate_table import read_series
    from surefoot.monitor.calibrate import calibrate as calibrated
    from surefoot.monitor.calibrate import healthy_start
    from surefoot.monitor.detectors import bindings, thresholds_of

    series = read_series(table)
    monitor, heal = _settings(table)
    start = healthy_start(series) if from_step is None else from_step
    if start > series.steps[-1]:
        raise ConfigError(f"the table ends at step {series.steps[-1]}", where="--from-step", hint="an earlier step")
    told = calibrated(
        series,
        from_step=start,
        thresholds=thresholds_of(monitor),
        budget_per_10k=budget,
        acting=bindings(heal),
        seed=seed,
        num_places=places,
    )
    if json_output:
        typer.echo(strict_json.dumps({"schema_version": SCHEMA_VERSION, **answer_of(told, budget=budget)}))
        return
    typer.echo("\n".join(page_of(told, budget=budget, chosen=from_step is not None)))


def _settings(table: Path) -> tuple[Any, Any]:
    from surefoot.core.sections import HealSection, MonitorSection

    if not table.is_dir() or not (table / "config.toml").is_file():
        return MonitorSection(), HealSection()
    from surefoot.config.load import load_config

    config = load_config(table / "config.toml").config
    return config.monitor, config.heal


def answer_of(told: Calibration, *, budget: float) -> dict[str, Any]:
    """`num_steps` counts rows: a table of every fifth step has as many as it has lines."""
    return {
        "num_steps": told.num_rows,
        "num_healthy": told.num_healthy_rows,
        "from_step": told.from_step,
        "budget_per_10k": budget,
        "detectors": [_detector(one) for one in told.detectors],
        "acting": list(told.acting),
        "all_per_10k": told.acting_per_10k,
    }


def _detector(one: Calibrated) -> dict[str, Any]:
    from surefoot.monitor.calibrate import MEANT_FOR, SETTINGS

    meant = one.powers.get(MEANT_FOR.get(one.name, ""))
    return {
        "name": one.name,
        "asks": one.asks,
        "false_alarms_per_10k": one.per_10k,
        "alarms": list(one.alarms),
        "delay": meant.delay_rows if meant is not None else None,
        "delays": {
            fault: {"places": power.num_places, "found": power.num_found, "delay": power.delay_rows} for fault, power in one.powers.items()
        },
        "setting": SETTINGS.get(one.name),
        "threshold": one.threshold,
        "suggested": one.suggested,
    }


def page_of(told: Calibration, *, budget: float, chosen: bool) -> list[str]:
    """A line per detector."""
    from surefoot.monitor.calibrate import MEANT_FOR

    how = "as asked" if chosen else "by default"
    lines = [
        f"{told.num_rows} rows, taken to be healthy from step {told.from_step} on ({how}): {told.num_healthy_rows} rows",
        f"{'detector':<22} {'asks':<9} {'false/10k':>9} {'alarms':>7}  {'found after':<38} {'threshold':>9} {'suggested':>9}",
    ]
    for one in told.detectors:
        fault = MEANT_FOR.get(one.name, "")
        power = one.powers.get(fault)
        found = f"{power.num_found}/{power.num_places} of {fault}" if power is not None and power.num_places else "-"
        if power is not None and power.delay_rows is not None:
            found += f", {power.delay_rows:g} rows"
        lines.append(
            f"{one.name:<22} {one.asks or 'off':<9} {one.per_10k:>9.2f} {len(one.alarms):>7}  {found:<38} {_shown(one.threshold):>9}"
            f" {_shown(one.suggested):>9}"
        )
    lines.append(f"those that act, {', '.join(told.acting)}: {told.acting_per_10k:.2f} false alarms per 10,000 rows")
    lines.append(
        f"suggested: the smallest thresholds that raise {budget:g} per 10,000 rows of this table together at most, in equal parts, and none"
        " below half of its default; they say nothing of other runs"
    )
    for one in told.detectors:
        if one.alarms:
            shown = ", ".join(map(str, one.alarms[:12])) + (f" and {len(one.alarms) - 12} more" if len(one.alarms) > 12 else "")
            lines.append(f"{one.name} spoke first at {shown}")
    return lines


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
