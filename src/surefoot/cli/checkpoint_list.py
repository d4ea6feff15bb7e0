"""`surefoot checkpoint list`: which checkpoints a run has, how far each is trusted, and what a bad stretch of training got into."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.checkpoint.inspect import published, read_ref
from surefoot.checkpoint.manifest import parse_id
from surefoot.cli.checkpoint_find import SCHEMA_VERSION, lineage_of, manifest_or_none, unledgered
from surefoot.core import strict_json
from surefoot.core.errors import CheckpointError, ConfigError
from surefoot.core.records import CheckpointRef, ManifestFile, Rung
from surefoot.core.units import show_bytes
from surefoot.guard.contaminated import contaminated_here
from surefoot.heal.contamination import Contamination, WayBack
from surefoot.observe.lineage import Lineage, Look
from surefoot.observe.run_dir import CHECKPOINTS_NAME, require_run

_ONCE_PER_JOB = "written once per job, by rank 0's side"
_NO_WRITER = "writer not recorded"  # all of format 1
_DIGITS = 12
"""Of a state digest, for people."""
_WRITERS_SINCE = 2
"""The format that names who wrote each file."""
_WINDOW = re.compile(r"(\d+):(\d+)")


def list_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    shards: Annotated[bool, typer.Option("--shards", help="Each file too: who wrote it, who looked at it last, what they found.")] = False,
    window: Annotated[
        str, typer.Option("--window", metavar="A:B", help="Mark what the training steps A to B got into, and name a way back.")
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the checkpoints of a run in the order of their commits.

    Examples: surefoot checkpoint list runs/quickstart | surefoot checkpoint list runs/quickstart --shards --json |
    surefoot checkpoint list runs/quickstart --window 1200:1300
    """
    require_run(run_dir)
    steps = _parsed_window(window) if window else None
    root, lineage = run_dir / CHECKPOINTS_NAME, lineage_of(run_dir)
    standing = _standing(root, lineage)
    found = _contaminated(root, lineage, standing, steps=steps) if steps else None
    rows = [_row(ref, root, lineage, shards=shards, affected=ref.id in found.affected if found else None) for ref in standing]
    if json_output:
        answer: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "checkpoints": rows}
        typer.echo(strict_json.dumps(answer if found is None else {**answer, "window": _window_row(found)}))
        return
    lines = [_HEADER, *(line for row in rows for line in _lines(row))] if rows else [f"no checkpoints in {run_dir}"]
    typer.echo("\n".join(lines if found is None else [*lines, *_window_lines(found)]))


def _standing(root: Path, lineage: Lineage) -> list[CheckpointRef]:
    """One per folder that is there, in ledger order, then those that the ledger does not know; `abandoned` says that it is on no line."""
    folders = published(root)
    known = [ref for ref in lineage.refs if ref.id in folders]
    to_adopt = {manifest.id for manifest in unledgered(root, lineage)}
    return known + [_ref_of_folder(root / name, on_line=name in to_adopt) for name in folders if lineage.ref(name) is None]


def _ref_of_folder(path: Path, *, on_line: bool) -> CheckpointRef:
    """From its manifest, or only from its name when that cannot be read: `verify` says why."""
    try:
        ref = read_ref(path)
        step, attempt, parent, digest, size = ref.step, ref.attempt, ref.parent, ref.state_digest, ref.num_bytes
    except CheckpointError:
        step, attempt, _ = parse_id(path.name) or (0, 0, 0)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        parent, digest = None, ""
    return CheckpointRef(path.name, step, attempt, parent, digest, size, abandoned=not on_line)


def _row(ref: CheckpointRef, root: Path, lineage: Lineage, *, shards: bool, affected: bool | None) -> dict[str, Any]:
    row = {
        "id": ref.id,
        "step": ref.step,
        "attempt": ref.attempt,
        "lineage": "abandoned" if ref.abandoned else "current",
        "rung": ref.rung,
        "suspect": ref.suspect,
        "tiers": ["disk", *lineage.tiers.get(ref.id, ())],
        "state_digest": ref.state_digest,
        "bytes": ref.num_bytes,
        "path": str(root / ref.id),
        "read_back": ref.read_back,
        "damaged": ref.damaged,
        "rejected": ref.id in lineage.rejected,
    }
    if shards:
        row["shards"] = _shards(root / ref.id, lineage.looks.get(ref.id, ()))
    return row if affected is None else {**row, "contaminated": affected}


def _shards(folder: Path, looks: Sequence[Look]) -> list[dict[str, Any]]:
    """One per file that the manifest names, with the last look that said something about it."""
    manifest = manifest_or_none(folder)
    return [_shard(file, looks, has_writers=manifest.format_version >= _WRITERS_SINCE) for file in manifest.files] if manifest else []


def _shard(file: ManifestFile, looks: Sequence[Look], *, has_writers: bool) -> dict[str, Any]:
    """A look that found damage elsewhere says nothing about this file."""
    telling = [look for look in looks if look.ok or file.name in look.bad_files or not look.bad_files]
    last = telling[-1] if telling else None
    return {
        "file": file.name,
        "bytes": file.num_bytes,
        "rank": file.rank if file.rank >= 0 else None,
        "host": file.host or None,
        "once_per_job": has_writers and file.rank < 0,
        "verifier": last.by if last else None,
        "verified_on": last.host if last else None,
        "time_utc": last.time_utc if last else None,
        "look": last.event.partition(".")[2] if last else None,
        "verdict": "unknown" if last is None else "ok" if last.ok else "damaged",
    }


def _parsed_window(text: str) -> tuple[int, int]:
    match = _WINDOW.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]) or int(match[1]) == 0:
        raise ConfigError(f"{text!r} is no window of training steps", where="--window", hint="write --window FIRST:LAST, as in 1200:1300")
    return int(match[1]), int(match[2])


def _contaminated(root: Path, lineage: Lineage, standing: Sequence[CheckpointRef], *, steps: tuple[int, int]) -> Contamination:
    now = max(lineage.counters.step, max((ref.step for ref in standing if not ref.abandoned), default=0))
    return contaminated_here(root, lineage, standing, steps=steps, step=now)


def _window_row(found: Contamination) -> dict[str, Any]:
    ways: dict[str, WayBack | None] = {"newest_clean": found.newest, "choice": found.choice}
    return {
        "first_step": found.first_step,
        "last_step": found.last_step,
        "affected": list(found.affected),
        "clean": list(found.clean),
        **{name: asdict(way) if way else None for name, way in ways.items()},
        "reason": found.reason,
    }


_HEADER = f"{'id':<16} {'step':<13} {'size':>10}  {'lineage, how far it is trusted, marks':<36} {'state':<{_DIGITS + 4}}  folder"
_MARKS = {"suspect": "suspect", "damaged": "damaged", "rejected": "rejected", "contaminated": "in the window"}


def _lines(row: Mapping[str, Any]) -> list[str]:
    marked = [word for mark, word in _MARKS.items() if row.get(mark)]
    read_back = ["read-back"] if row["read_back"] and row["rung"] == Rung.COMMITTED and not row["damaged"] else []
    marks = " ".join([row["lineage"], row["rung"], *read_back, *marked])
    kind, _, digits = row["state_digest"].partition(":")
    digest = f"{kind}:{digits[:_DIGITS]}" if digits else "unreadable"
    line = f"{row['id']:<16} step {row['step']:<8} {show_bytes(row['bytes']):>10}  {marks:<36} {digest:<{_DIGITS + 4}}  {row['path']}"
    return [line, *(_shard_line(shard) for shard in row.get("shards", ()))]


def _shard_line(shard: Mapping[str, Any]) -> str:
    unnamed = _ONCE_PER_JOB if shard["once_per_job"] else _NO_WRITER
    writer = f"written by rank {shard['rank']} on {shard['host']}" if shard["rank"] is not None else unnamed
    seen = (
        f"{shard['look']} by {shard['verifier']} on {shard['verified_on']} at {shard['time_utc']}" if shard["look"] else "nobody looked yet"
    )
    return f"  {shard['file']:<20} {show_bytes(shard['bytes']):>10}  {shard['verdict']:<8} {writer}, {seen}"


def _window_lines(found: Contamination) -> list[str]:
    affected = f"steps {found.first_step} to {found.last_step} are in {', '.join(found.affected) or 'none of them'}"
    return [affected, f"go back to {found.choice.id}: {found.reason}" if found.choice else found.reason]
