"""`surefoot resume`: the one way on after a halt."""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import Annotated

import typer

from surefoot.core.clock import SystemClock
from surefoot.core.errors import ConfigError, TrainingHalted
from surefoot.core.events import Event
from surefoot.observe.halts import refuse_halted
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from surefoot.observe.lineage import fold_counters


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a halted run")],
    cause: Annotated[str, typer.Option("--cause", help="what it was, for the ledger")] = "",
) -> None:
    """Let a halted run go on. Ledgered with your name and the cause; `surefoot train RUN` then continues it.

    \b
    Examples:
      surefoot resume runs/quickstart --cause "bad shard, replaced"
    """
    if not (run / LEDGER_NAME).exists():
        raise ConfigError("no ledger in it, so it is not a run", where=str(run), hint="give the folder of a run")
    entries = read_ledger(run / LEDGER_NAME)
    try:
        refuse_halted(entries)
    except TrainingHalted:
        counters = fold_counters(entries)
        Ledger(run / LEDGER_NAME, clock=SystemClock(), by=_user()).append(
            Event.RUN_RELEASED, generation=counters.generation, attempt=counters.attempt, step=counters.step, reason=cause
        )
        typer.echo(f"released: `surefoot train {run}` goes on")
        return
    typer.echo("the run is not halted: there is nothing to release")


def _user() -> str:
    """Who says so. A container often runs under a number that no passwd entry names."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Python 3.13 made it an OSError
        return f"uid {os.getuid()}"
