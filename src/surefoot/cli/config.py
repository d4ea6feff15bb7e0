"""`surefoot config show`: every setting as it would be used, and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.bound_rules import refuse_unknown_rules
from surefoot.cli.console import say
from surefoot.config import LoadedConfig, load_config
from surefoot.core.config_text import config_text
from surefoot.core.strict_json import dumps, plain

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def config() -> None:
    """Show a config with the origin of every value."""


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE|RUN", help="A TOML config, or a run folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that win over the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: config, origins, hashes, warnings.")] = False,
) -> None:
    """Print every setting with its origin: file and line, override, preset or default.

    The output is a TOML that means the same in FILE's folder. The hashes at its end identify the run: a resume under other ones is refused.

    \b
    Examples:
      surefoot config show examples/quickstart.toml
      surefoot config show examples/quickstart.toml train.num_steps=60 optimizer.lr=1e-3
      surefoot config show runs/quickstart --json
    """
    loaded = load_config(file, tuple(overrides or ()))
    refuse_unknown_rules(loaded.config)
    if as_json:
        typer.echo(dumps(_as_json(loaded, shown_as=str(file))))
        return
    typer.echo(config_text(loaded.config, folder=loaded.path.parent, origins=loaded.origins))
    typer.echo("# identity of the run, sha256 per section")
    for name, value in loaded.hashes.items():
        typer.echo(f"# {name:<10} {value}")
    for warning in loaded.warnings:
        say(f"warning: {warning}", err=True)


def _as_json(loaded: LoadedConfig, *, shown_as: str) -> dict[str, object]:
    return {
        "schema_version": 1,
        "path": shown_as,
        "config": plain(loaded.config),
        "origins": dict(loaded.origins),
        "hashes": dict(loaded.hashes),
        "warnings": list(loaded.warnings),
    }
