"""`surefoot data`: make it from text, look at it, and leave parts of it out."""

from __future__ import annotations

import typer

from surefoot.cli.data_block import block
from surefoot.cli.data_locate import locate
from surefoot.cli.data_prepare import prepare
from surefoot.cli.data_report import report
from surefoot.cli.data_rules import app as rules_app

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.command("prepare", short_help="Turn text into a folder of checked token shards.")(prepare)
app.command("report", short_help="What prepared data holds, and what is odd in it.")(report)
app.command("locate", short_help="Which documents a step trains on, and when a document is.")(locate)
app.command("block", short_help="Ask a run to leave something out.")(block)
app.add_typer(rules_app, name="rules", short_help="The quality rules, and new ones from documents that were bad.")


@app.callback()
def data() -> None:
    """Prepare text, look into it, leave parts of it out."""
