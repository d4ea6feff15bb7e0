"""`surefoot sweep`: proxy runs planned, trained, gathered and fitted. A file for each of its verbs."""

from __future__ import annotations

import typer

from surefoot.cli.sweep_fit import fit_
from surefoot.cli.sweep_gather import gather_
from surefoot.cli.sweep_plan import plan_
from surefoot.cli.sweep_probe import probe_
from surefoot.cli.sweep_run import run_

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.command("plan")(plan_)
app.command("run")(run_)
app.command("gather")(gather_)
app.command("fit")(fit_)
app.command("probe")(probe_)


@app.callback()
def sweep() -> None:
    """Small runs that say what the large one should be: plan them, train them, gather their losses, fit a law."""
