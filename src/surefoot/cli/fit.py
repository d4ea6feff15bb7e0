"""`surefoot fit`: scaling laws from a table of finished runs, with bands."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError


class Law(StrEnum):
    PARAMETRIC = "parametric"
    ISOFLOP = "isoflop"
    LR = "lr"
    BATCH = "batch"


def fit(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="CSV of finished runs, one per line.")],
    law: Annotated[Law, typer.Option("--law", help="What to fit.")],
    at: Annotated[list[float] | None, typer.Option("--at", metavar="FLOPS", help="Say what the law means for this budget; repeat.")] = None,
    count: Annotated[str, typer.Option("--count", metavar="COLUMN", help="The column that N is from.")] = "",
    drop_highest: Annotated[int, typer.Option("--drop-highest", min=0, help="Leave out so many rows of the highest losses.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.html", help="Also draw the runs and the law.")] = None,
    draws: Annotated[int, typer.Option("--draws", min=10, help="Fits behind the bands of --law parametric.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws behind the bands.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object; `plan` reads it as a law.")] = False,
) -> None:
    """Fit a scaling law to finished runs.

    Columns: n (parameters), tokens or flops, loss (nats per token); --law lr also needs lr, --law batch needs batch. With n_active or
    n_without_embedding beside n, the fit of each is shown. Bands are 95%. parametric is L = E + A/N^alpha + B/D^beta; isoflop is
    N* = coef C^a through the best size of each budget; lr = coef N^p D^q; batch = coef D^q.

    Examples: surefoot fit runs.csv --law parametric --at 1e24 | surefoot fit sweep.csv --law isoflop --json
    """
    from surefoot.cli.fit_page import page
    from surefoot.plan.fits.answer import Question, answer_of
    from surefoot.plan.fits.table import read_table

    if plot is not None and plot.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{plot.name} is no page", where="--plot", hint=f"a plot is a page for a browser: {plot.stem or 'fit'}.html")
    question = Question(count=count, at=tuple(at or ()), drop_highest=drop_highest, num_draws=draws, seed=seed)
    runs = read_table(table)
    answer = answer_of(runs, law=law.value, question=question)
    if plot is not None:
        from surefoot.plan.fits.plot import write_plot

        write_plot(plot, table=runs, answer=answer)
    typer.echo(strict_json.dumps({"schema_version": 1, **answer}) if json_output else "\n".join(page(answer)))
