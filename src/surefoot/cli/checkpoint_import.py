"""`surefoot checkpoint import`: a checkpoint from elsewhere, verified on the way in, and the ledger says from where."""

from __future__ import annotations

import socket
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.checkpoint.clean import run_clean
from surefoot.checkpoint.inspect import num_bytes
from surefoot.checkpoint.manifest import MANIFEST_NAME, read_manifest
from surefoot.checkpoint.prove import LIMIT_S
from surefoot.checkpoint.readback import verify_files
from surefoot.checkpoint.transplant import free_id, transplant
from surefoot.cli.checkpoint_find import SCHEMA_VERSION, Found, describe, find, lineage_of, manifest_or_none
from surefoot.cli.ledgering import tell
from surefoot.core import strict_json
from surefoot.core.errors import ConfigError, Corrupt, error_from_json
from surefoot.core.events import Event
from surefoot.core.records import Manifest
from surefoot.observe.blocks import fold_blocks, taken_fields
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.run_dir import CHECKPOINTS_NAME, CONFIG_NAME, require_run


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from: names and digests, no folder of this machine."""

    run: str
    checkpoint: str
    manifest_hash: str


def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint folder, or a run folder for its newest checkpoint.")],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run that takes it in.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Which step a stock DCP folder is of, when its optimizer does not say.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify a checkpoint from elsewhere and take it into a run: one of surefoot, or a stock DCP folder with weights and moments.

    A run without checkpoints goes on from it; any other one when it is told to.

    Examples: surefoot checkpoint import backup/s500-a1 runs/quickstart | surefoot checkpoint import theirs/step-500 runs/quickstart
    """
    require_run(run_dir)
    found = find(source)
    if found.run_dir is not None and found.run_dir.samefile(run_dir):
        raise ConfigError(f"{found.id} is a checkpoint of this run already", where=str(source), hint="see `surefoot checkpoint list RUN`")
    is_foreign = not (found.folder / MANIFEST_NAME).exists()
    before = None if is_foreign else taken_in_before(read_manifest(found.folder), run_dir)
    notes: list[str] = []
    if before is not None:
        manifest = before
    elif is_foreign:
        manifest, notes = _take_in_foreign(found, run_dir, step=step)
    else:
        manifest = take_in(found, run_dir, run=_name_of(run_dir))
    is_next = (newest := lineage_of(run_dir).newest()) is not None and newest.id == manifest.id
    differing = _differing(manifest, run_dir)
    if json_output:
        answer = {"schema_version": SCHEMA_VERSION, "id": manifest.id, "path": str(run_dir / CHECKPOINTS_NAME / manifest.id)}
        answer |= {"state_digest": manifest.state_digest, "bytes": num_bytes(manifest), "resumes_next": is_next}
        answer |= {"differs": differing, "notes": notes, "was_there": before is not None}
        typer.echo(strict_json.dumps(answer))
        return
    flags = "".join(f" --accept-changes {section}" for section in differing)
    way = f"surefoot train {run_dir}{flags}" if is_next else f"surefoot train {run_dir} --resume-from {manifest.id}{flags}"
    how = "is there already, as" if before is not None else "imported as"
    lines = [f"{how} {manifest.id}, state {manifest.state_digest}", *(f"note: {note}" for note in notes), f"go on from it: {way}"]
    typer.echo("\n".join(lines))


def taken_in_before(source: Manifest, run_dir: Path) -> Manifest | None:
    """The copy of this very checkpoint that an earlier import left in the run, if it is still there and whole: reads every byte of it."""
    lineage = lineage_of(run_dir)
    for entry in reversed(read_ledger(run_dir / LEDGER_NAME, up_to_damage=True)):
        if entry.event != Event.CHECKPOINT_IMPORTED or entry.fields.get("from_manifest") != source.hash:
            continue
        ref = lineage.ref(str(entry.fields.get("id")))
        if ref is None or ref.id in lineage.retired or ref.damaged or ref.state_digest != source.state_digest:
            continue
        copy = manifest_or_none(run_dir / CHECKPOINTS_NAME / ref.id)
        if copy is not None and copy.state_digest == ref.state_digest and not verify_files(run_dir / CHECKPOINTS_NAME / ref.id):
            return copy
    return None


def take_in(found: Found, run_dir: Path, *, run: str, note: Callable[[Origin], None] | None = None) -> Manifest:
    """Verify, copy, read the copy back, ledger. `note` is called before anything of it is ledgered. Raises Corrupt for a damaged one."""
    from surefoot.checkpoint.verify import verify

    problems = [*found.problems, *verify(found.folder)]
    if problems:
        told = "; ".join(describe(problem) for problem in problems[:5])
        raise Corrupt(f"it is not what was written: {told}", where=str(found.folder), hint="see `surefoot checkpoint verify`")
    source = read_manifest(found.folder)
    origin = Origin(source.run, source.id, source.hash)
    if note is not None:
        note(origin)
    _bring_blocklist(found, run_dir)
    root, lineage = run_dir / CHECKPOINTS_NAME, lineage_of(run_dir)
    name = free_id(source.step, taken=lambda name: lineage.ref(name) is not None or (root / name).exists())
    seq, hash_ = _position(run_dir)
    generation = lineage.counters.generation
    new = transplant(found.folder, root, checkpoint=name, run=run, generation=generation, ledger_seq=seq, ledger_hash=hash_)
    _tell_imported(run_dir, new, origin)
    return new


def _bring_blocklist(found: Found, run_dir: Path) -> None:
    """What the other run leaves out of its data belongs to its checkpoints: here too from now on, entry by entry, where nothing else is.

    What a bare copy of a checkpoint was trained without is not known; `train` refuses it by name when it was something.
    """
    if found.run_dir is None:
        return
    ours, theirs = (fold_blocks(read_ledger(run / LEDGER_NAME, up_to_damage=True)) for run in (run_dir, found.run_dir))
    if ours.heads != theirs.heads[: len(ours.heads)]:
        return
    for number, (entry, head) in enumerate(zip(theirs.taken, theirs.heads[1:], strict=True), start=1):
        if number > ours.count:
            fields = taken_fields(entry.block, asked=None, count=number, head=head)
            tell(run_dir, Event.BLOCK_TAKEN, by=entry.block.by, rule="checkpoint import", reason=entry.block.reason, fields=fields)


def _take_in_foreign(found: Found, run_dir: Path, *, step: int | None) -> tuple[Manifest, list[str]]:
    """Through the run's own model, in a clean process: only that knows which tensor is which. Raises what that process raised."""
    if not (run_dir / CONFIG_NAME).is_file():
        raise ConfigError(f"the run has no {CONFIG_NAME} that says what model it is", where=str(run_dir), hint="start the run first")
    lineage = lineage_of(run_dir)
    seq, hash_ = _position(run_dir)
    job: dict[str, Any] = {
        "path": str(found.folder.absolute()),
        "run_dir": str(run_dir.absolute()),
        "step": step,
        "ledger_seq": seq,
        "ledger_hash": hash_,
    }
    job |= {"generation": lineage.counters.generation, "taken": [ref.id for ref in lineage.refs]}
    answer: dict[str, Any] = run_clean("surefoot.cli.foreign_import", job, limit_s=LIMIT_S)
    if "error" in answer:
        raise error_from_json(answer)
    new = read_manifest(run_dir / CHECKPOINTS_NAME / answer["id"])
    _tell_imported(run_dir, new, Origin(found.folder.name, "", ""))
    left = f"left out: {', '.join(answer['left_out'])}"
    return new, [*answer["notes"], *([left] if answer["left_out"] else []), *(f"{key} is {other}" for key, other in answer["tied"].items())]


def _position(run_dir: Path) -> tuple[int, str]:
    """Where the ledger stands; a run that has none yet gets its first line."""
    entries = read_ledger(run_dir / LEDGER_NAME)
    entry = entries[-1] if entries else tell(run_dir, Event.RUN_CREATED)
    return entry.seq, entry.hash


def _tell_imported(run_dir: Path, new: Manifest, origin: Origin) -> None:
    """Ledger it, then read it back. Raises Corrupt when storage does not give back what was written."""
    tell(run_dir, Event.CHECKPOINT_IMPORTED, rule="checkpoint import", fields=_imported(new, origin))
    folder, began_s = run_dir / CHECKPOINTS_NAME / new.id, time.monotonic()
    damage = verify_files(folder, expected_hash=new.hash)
    fields: dict[str, Any] = {"id": new.id, "host": socket.gethostname(), "wall_s": round(time.monotonic() - began_s, 3)}
    if damage:
        tell(run_dir, Event.CHECKPOINT_DAMAGED, fields={**fields, "problems": damage})
        raise Corrupt(f"the copy is damaged: {describe(damage[0])}", where=str(folder), hint="look at the disk, then import again")
    tell(run_dir, Event.CHECKPOINT_VERIFIED, fields={**fields, "num_files": len(new.files), "num_bytes": num_bytes(new)})


def _imported(new: Manifest, origin: Origin) -> dict[str, object]:
    return {
        "id": new.id,
        "step": new.step,
        "attempt": new.attempt,
        "parent": None,
        "state_digest": new.state_digest,
        "num_bytes": num_bytes(new),
        "from_run": origin.run,
        "from_checkpoint": origin.checkpoint,
        "from_manifest": origin.manifest_hash,
    }


def _name_of(run_dir: Path) -> str:
    if (run_dir / CONFIG_NAME).is_file():
        name = tomllib.loads((run_dir / CONFIG_NAME).read_text()).get("run", {}).get("name")
        if isinstance(name, str):
            return name
    return run_dir.absolute().name


def _differing(manifest: Manifest, run_dir: Path) -> list[str]:
    """Sections of the run's config that are not those under which the checkpoint was made; `train` asks for them to be accepted."""
    if not (run_dir / CONFIG_NAME).is_file():
        return []
    from surefoot.config import load_config
    from surefoot.core.identity import code_hashes, other_sections, section_hashes

    config = load_config(run_dir / CONFIG_NAME).config
    hashes: Mapping[str, str] = section_hashes(config) | code_hashes(config)
    return other_sections(manifest.config_hashes, now=hashes)
