"""`surefoot checkpoint`: which checkpoints a run has, and whether their bytes are those that were written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.checkpoint.inspect import published, read_ref
from surefoot.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, parse_id, read_manifest
from surefoot.core import strict_json
from surefoot.core.errors import CheckpointError, ConfigError
from surefoot.core.records import CheckpointRef, Manifest, Problem
from surefoot.core.units import show_bytes
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import Lineage, adoptable, fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME, is_run, require_run

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List and verify checkpoints.")

_SCHEMA_VERSION = 1
_TIERS = ("disk",)
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def list_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    json_output: _Json = False,
) -> None:
    """List the checkpoints of a run in the order of their commits.

    Example: surefoot checkpoint list runs/quickstart
    """
    require_run(run_dir)
    rows = _rows(run_dir)
    if json_output:
        typer.echo(strict_json.dumps({"schema_version": _SCHEMA_VERSION, "checkpoints": rows}))
    else:
        typer.echo("\n".join(_line(row) for row in rows) or f"no checkpoints in {run_dir}")


@app.command("verify")
def verify_(
    path: Annotated[Path, typer.Argument(metavar="PATH|RUN", help="A checkpoint folder, or a run folder for its newest checkpoint.")],
    json_output: _Json = False,
) -> None:
    """Read every byte of a checkpoint and compare it with what was written. Exit 1 when something differs.

    Examples: surefoot checkpoint verify runs/quickstart | surefoot checkpoint verify copies/s500-a1 --json
    """
    from surefoot.checkpoint.verify import verify

    folder, problems = _find(_existing(path))
    problems += verify(folder)
    if json_output:
        answer = {"schema_version": _SCHEMA_VERSION, "ok": not problems, "path": str(folder), "problems": [asdict(p) for p in problems]}
        typer.echo(strict_json.dumps(answer))
    else:
        typer.echo("\n".join(_describe(problem) for problem in problems) or f"ok: {folder}: {_summary(folder)}")
    if problems:
        raise typer.Exit(1)


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError("no such folder", where=str(path), hint="give a run folder, as in runs/quickstart, or a checkpoint folder in it")
    return path


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    """One row per folder that is there: first in ledger order, then those that the ledger does not know."""
    root = run_dir / CHECKPOINTS_NAME
    lineage = fold_lineage(read_ledger(run_dir / LEDGER_NAME, up_to_damage=True))
    folders = published(root)
    known = [ref for ref in lineage.refs if ref.id in folders]
    unknown = [name for name in folders if lineage.ref(name) is None]
    to_adopt = {manifest.id for manifest in _unledgered(root, lineage)}
    rows = [_row(ref, root, on_line=not ref.abandoned) for ref in known]
    return rows + [_row(_ref_of_folder(root / name), root, on_line=name in to_adopt) for name in unknown]


def _row(ref: CheckpointRef, root: Path, *, on_line: bool) -> dict[str, Any]:
    return {
        "id": ref.id,
        "step": ref.step,
        "attempt": ref.attempt,
        "lineage": "current" if on_line else "abandoned",
        "rung": ref.rung,
        "suspect": ref.suspect,
        "tiers": list(_TIERS),
        "state_digest": ref.state_digest,
        "bytes": ref.num_bytes,
        "path": str(root / ref.id),
    }


def _manifest_or_none(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def _ref_of_folder(path: Path) -> CheckpointRef:
    """From its manifest, or only from its name when that cannot be read: `verify` says why."""
    try:
        return read_ref(path)
    except CheckpointError:
        step, attempt, _ = parse_id(path.name) or (0, 0, 0)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        return CheckpointRef(path.name, step=step, attempt=attempt, parent=None, state_digest="", num_bytes=size)


def _find(path: Path) -> tuple[Path, list[Problem]]:
    """The checkpoint folder that is meant, and what the ledger finds wrong with it at once."""
    if not is_run(path):
        if parse_id(path.name) is None and not any((path / name).exists() for name in (MANIFEST_NAME, METADATA_NAME)):
            raise ConfigError("neither a run folder nor a checkpoint folder", where=str(path), hint="see `surefoot checkpoint list RUN`")
        return path, []
    lineage = fold_lineage(read_ledger(path / LEDGER_NAME, up_to_damage=True))
    unledgered = _unledgered(path / CHECKPOINTS_NAME, lineage)
    ref = read_ref(path / CHECKPOINTS_NAME / unledgered[-1].id) if unledgered else lineage.newest()
    if ref is None:
        raise ConfigError("this run has no checkpoint yet", where=str(path), hint="a run saves every checkpoint.interval_steps steps")
    folder = path / CHECKPOINTS_NAME / ref.id
    manifest = _manifest_or_none(folder)
    if manifest is not None and manifest.state_digest != ref.state_digest:
        detail = f"state_digest {manifest.state_digest}, the ledger says {ref.state_digest}"
        return folder, [Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=detail)]
    return folder, []


def _unledgered(root: Path, lineage: Lineage) -> list[Manifest]:
    """Checkpoints that were published by a process which died before it could say so; the next start adopts them."""
    return adoptable([manifest for name in published(root) if (manifest := _manifest_or_none(root / name))], lineage)


def _line(row: Mapping[str, Any]) -> str:
    marks = " ".join([row["lineage"], row["rung"], *(["suspect"] if row["suspect"] else [])])
    return f"{row['id']:<16} step {row['step']:<8} {show_bytes(row['bytes']):>10}  {marks:<20} {row['state_digest']}  {row['path']}"


def _describe(problem: Problem) -> str:
    return " ".join(part for part in (problem.kind, problem.file, problem.tensor, f"({problem.detail})" if problem.detail else "") if part)


def _summary(folder: Path) -> str:
    manifest = read_manifest(folder)
    return f"{len(manifest.files)} files, {len(manifest.tensors)} tensors, state {manifest.state_digest}"
