"""`surefoot status`: where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli.trust import trust_word
from surefoot.core import strict_json
from surefoot.core.units import show_count, show_duration


def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say where a run stands: step, loss, checkpoint, health, time left. Works on live, stopped and damaged runs.

    Example: surefoot status runs/quickstart
    """
    from surefoot.report.status import status_of

    answer = status_of(run_dir)
    typer.echo(strict_json.dumps({"schema_version": 1, **answer}) if json_output else "\n".join(_lines(answer, run_dir)))


def _lines(answer: Mapping[str, Any], run_dir: Path) -> list[str]:
    lines = [
        f"{answer['run']}  {_state(answer)}",
        f"  step        {_progress(answer)}  attempt {answer['attempt']}, {answer['num_restarts']} restarts",
        f"  loss        {_number(answer['loss'])}  held-out {_number(answer['val_loss'])}  health {answer['verdict']}",
        f"  checkpoint  {_checkpoint(answer)}",
    ]
    if answer["halted"]:
        lines.append(_halted(answer, run_dir))
    if wish := answer["next_start"]:
        lines.append(f"  next start  from {wish['checkpoint']}, as {wish['by']} asked: `surefoot train {run_dir}`")
    if answer["pid"] is not None:
        lines.append(f"  agent       pid {answer['pid']} on {answer['host']}")
    for rank in answer["ranks"]:
        lines.append(
            f"  rank {rank['rank']:<6} pid {rank['pid']}  {rank['phase']} at step {rank['step']}, {show_duration(rank['age_s'])} ago"
        )
    return lines + [f"  problem     {problem}" for problem in answer["problems"]]


def _halted(answer: Mapping[str, Any], run_dir: Path) -> str:
    """Who or what, since when, and the way on."""
    halted = answer["halted"]
    who = halted["by"] or halted["rule"]
    way_on = "goes on" if answer["pid"] is not None else f"releases it, `surefoot train {run_dir}` goes on then"
    what = f"at step {halted['step']} by {who}: {halted['reason'] or 'no reason was given'}, since {halted['time_utc']}"
    return f"  {halted['state']:<10}  {what}; `surefoot resume {run_dir}` {way_on}"


def _state(answer: Mapping[str, Any]) -> str:
    if answer["finished"] and answer["phase"] == "stopped":
        return "finished"
    if answer["halted"] and answer["phase"] == "stopped":
        return str(answer["halted"]["state"])
    age = answer["last_step_age_s"]
    return str(answer["phase"]) + (f", last step {show_duration(age)} ago" if age is not None else "")


def _progress(answer: Mapping[str, Any]) -> str:
    total = f" of {answer['num_steps']}" if answer["num_steps"] is not None else ""
    tokens = f", {show_count(answer['tokens'])} tokens" if answer["tokens"] else ""
    eta = f", {show_duration(answer['eta_s'])} left" if answer["eta_s"] else ""
    return f"{answer['step']}{total}{tokens}{eta}"


def _checkpoint(answer: Mapping[str, Any]) -> str:
    checkpoint = answer["last_checkpoint"]
    if checkpoint is None:
        return "none known" if answer["problems"] else "none yet"
    word = trust_word(checkpoint["rung"], read_back=checkpoint["read_back"], damaged=checkpoint["damaged"])
    state = f"{checkpoint['id']} ({word}{', suspect' if checkpoint['suspect'] else ''})  state {answer['state_digest']}"
    prover = answer["prover"]
    if prover["newest_loaded"] is None or not prover["lag_checkpoints"]:
        return state
    return f"{state}  newest loaded {prover['newest_loaded']}, {prover['lag_steps']} steps behind"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
