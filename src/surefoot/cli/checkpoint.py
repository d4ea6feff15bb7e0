"""`surefoot checkpoint`: which checkpoints a run has, whether they are what was written, and what else can be done with them."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from surefoot.checkpoint.manifest import read_manifest
from surefoot.cli.checkpoint_branch import branch_
from surefoot.cli.checkpoint_export import export_
from surefoot.cli.checkpoint_find import SCHEMA_VERSION, Found, as_json, describe, find, lineage_of
from surefoot.cli.checkpoint_import import import_
from surefoot.cli.checkpoint_list import list_
from surefoot.cli.checkpoint_prove import prove_
from surefoot.cli.ledgering import tell
from surefoot.core import strict_json
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.records import Problem

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, verify, prove, move and export checkpoints.")
app.command("list", short_help="The checkpoints of a run, and how far each is trusted.")(list_)


@app.command("verify", short_help="Read every byte and compare with what was written.")
def verify_(
    path: Annotated[Path, typer.Argument(metavar="PATH|RUN", help="A checkpoint folder, or a run folder for its newest checkpoint.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read every byte of a checkpoint and compare it with what was written. Exit 1 when something differs.

    Of a run's checkpoint the ledger remembers damage, and that a damaged one is well again.

    Examples: surefoot checkpoint verify runs/quickstart | surefoot checkpoint verify copies/s500-a1 --json
    """
    from surefoot.checkpoint.verify import verify

    found = find(path)
    started_s = time.monotonic()
    problems = [*found.problems, *verify(found.folder)]
    _remember(found, problems, wall_s=time.monotonic() - started_s)
    if json_output:
        answer = {
            "schema_version": SCHEMA_VERSION,
            "ok": not problems,
            "path": str(found.folder),
            "problems": [as_json(p) for p in problems],
        }
        typer.echo(strict_json.dumps(answer))
    else:
        typer.echo("\n".join(describe(problem) for problem in problems) or f"ok: {found.folder}: {_summary(found.folder)}")
    if problems:
        raise typer.Exit(1)


@app.command("audit", short_help="The same for a folder of any origin, executing nothing.")
def audit_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint folder, whoever wrote it: stock DCP, safetensors, surefoot.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at a checkpoint of any origin without executing anything in it. Exit 1 when something is wrong.

    Stock DCP writes checksums that its own load never reads; here they are compared. What cannot be checked is said.

    Examples: surefoot checkpoint audit other/step-1000 | surefoot checkpoint audit exported --json
    """
    from surefoot.checkpoint.audit import audit

    if not path.is_dir():
        raise ConfigError("no such folder", where=str(path), hint="give the folder that holds .metadata or the .safetensors files")
    found = audit(path)
    if json_output:
        answer = {
            "schema_version": SCHEMA_VERSION,
            "ok": not found.problems,
            "path": str(path),
            "problems": [as_json(problem) for problem in found.problems],
            "kind": found.kind,
            "all_checked": found.num_checked == found.num_parts,
            "num_files": found.num_files,
            "num_tensors": found.num_tensors,
            "num_parts": found.num_parts,
            "num_checked": found.num_checked,
            "bytes": found.num_bytes,
            "unread": list(found.unread),
            "notes": list(found.notes),
        }
        typer.echo(strict_json.dumps(answer))
    else:
        unread = [f"not read, because it would execute code: {', '.join(found.unread)}"] if found.unread else []
        typer.echo("\n".join([*(describe(problem) for problem in found.problems), *unread, *found.notes, f"{path}: {found.summary()}"]))
    if found.problems:
        raise typer.Exit(1)


app.command("prove", short_help="Have clean processes load it and compare every digest.")(prove_)
app.command("import", short_help="Take a checkpoint from elsewhere into a run.")(import_)
app.command("export", short_help="Write the weights for other tools, and read them back.")(export_)
app.command("branch", short_help="Begin a new run at a checkpoint of another one.")(branch_)


def _remember(found: Found, problems: Sequence[Problem], *, wall_s: float) -> None:
    """The answer is given in any case: a ledger that cannot be written is told of beside it."""
    if found.run_dir is None or found.ref is None or not (problems or found.ref.damaged):
        return
    if found.id in lineage_of(found.run_dir).retired:  # meanwhile, and half deleted: no damage
        return
    fields: dict[str, object] = {"id": found.id, "host": socket.gethostname(), "wall_s": round(wall_s, 3), "by": "verify"}
    event = Event.CHECKPOINT_DAMAGED if problems else Event.CHECKPOINT_VERIFIED
    try:
        tell(found.run_dir, event, rule="checkpoint verify", fields=fields | ({"problems": list(problems)} if problems else {}))
    except (OSError, SurefootError) as error:
        typer.echo(f"note: the ledger does not remember this: {error}", err=True)


def _summary(folder: Path) -> str:
    manifest = read_manifest(folder)
    return f"{len(manifest.files)} files, {len(manifest.tensors)} tensors, state {manifest.state_digest}"
