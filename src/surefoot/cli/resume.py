"""`surefoot resume`: the one way on after a halt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.ledgering import tell
from surefoot.core.errors import ConfigError, TrainingHalted
from surefoot.core.events import Event
from surefoot.observe.halts import refuse_halted
from surefoot.observe.ledger import LEDGER_NAME, read_ledger


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
        tell(run, Event.RUN_RELEASED, reason=cause)
        typer.echo(f"released: `surefoot train {run}` goes on")
        return
    typer.echo("the run is not halted: there is nothing to release")
