"""`surefoot checkpoint import` and `branch`: a checkpoint goes on in another run, verified on the way, and the ledger says from where."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.checkpoint.inspect import num_bytes
from surefoot.checkpoint.manifest import parse_id, read_manifest
from surefoot.checkpoint.readback import verify_files
from surefoot.checkpoint.transplant import free_id, transplant
from surefoot.cli.checkpoint_find import SCHEMA_VERSION, Found, describe, find, lineage_of, manifest_or_none
from surefoot.cli.ledgering import tell
from surefoot.core import strict_json
from surefoot.core.durable import fsync_dir, write_atomic
from surefoot.core.errors import ConfigError, Corrupt
from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, Manifest
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.run_dir import CHECKPOINTS_NAME, CONFIG_NAME, require_run

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from: names and digests, no folder of this machine."""

    run: str
    checkpoint: str
    manifest_hash: str


def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint folder, or a run folder for its newest checkpoint.")],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run that takes it in.")],
    json_output: _Json = False,
) -> None:
    """Verify a checkpoint from elsewhere and take it into a run. A run without checkpoints goes on from it; any other one when told to.

    Example: surefoot checkpoint import backup/s500-a1 runs/quickstart
    """
    require_run(run_dir)
    found = find(source)
    if found.run_dir is not None and found.run_dir.samefile(run_dir):
        raise ConfigError(f"{found.id} is a checkpoint of this run already", where=str(source), hint="see `surefoot checkpoint list RUN`")
    manifest = take_in(found, run_dir, run=_name_of(run_dir))
    is_next = (newest := lineage_of(run_dir).newest()) is not None and newest.id == manifest.id
    differing = _differing(manifest, run_dir)
    if json_output:
        answer = {"schema_version": SCHEMA_VERSION, "id": manifest.id, "path": str(run_dir / CHECKPOINTS_NAME / manifest.id)}
        answer |= {"state_digest": manifest.state_digest, "bytes": num_bytes(manifest), "resumes_next": is_next, "differs": differing}
        typer.echo(strict_json.dumps(answer))
        return
    flags = "".join(f" --accept-changes {section}" for section in differing)
    way = f"surefoot train {run_dir}{flags}" if is_next else f"surefoot train {run_dir} --resume-from {manifest.id}{flags}"
    typer.echo(f"imported as {manifest.id}, state {manifest.state_digest}\ngo on from it: {way}")


def branch_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run to branch from.")],
    new_dir: Annotated[Path, typer.Option("--dir", metavar="NEW", help="The folder of the new run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="for example train.num_steps=6000")] = None,
    from_: Annotated[str, typer.Option("--from", metavar="STEP|ID", help="Which checkpoint; its newest when not given.")] = "",
    json_output: _Json = False,
) -> None:
    """Begin a new run at a checkpoint of another one: a cooldown, another batch, another rate. `surefoot train NEW` goes on.

    Example: surefoot checkpoint branch runs/quickstart --from 500 --dir runs/cooldown train.num_steps=600 schedule.decay_steps=100
    """
    require_run(run_dir)
    if not (run_dir / CONFIG_NAME).is_file():
        raise ConfigError(f"the run has no {CONFIG_NAME} to begin from", where=str(run_dir), hint="`checkpoint import` needs none")
    if new_dir.exists() and (not new_dir.is_dir() or any(new_dir.iterdir())):
        raise ConfigError("there is something already", where=str(new_dir), hint="give a new folder with --dir")
    found = _chosen(run_dir, from_)
    new = _new_run(found, run_dir, new_dir, tuple(overrides or ()))
    if json_output:
        answer = {"schema_version": SCHEMA_VERSION, "run": str(new_dir), "id": new.id, "step": new.step, "state_digest": new.state_digest}
        typer.echo(strict_json.dumps(answer | {"from": found.id}))
        return
    typer.echo(f"{new_dir} begins at step {new.step}, from {found.id} of {run_dir}\ngo on with it: surefoot train {new_dir}")


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
    root, lineage = run_dir / CHECKPOINTS_NAME, lineage_of(run_dir)
    name = free_id(source.step, taken=lambda name: lineage.ref(name) is not None or (root / name).exists())
    entries = read_ledger(run_dir / LEDGER_NAME)
    seq, hash_ = (entries[-1].seq, entries[-1].hash) if entries else (0, "")
    generation = lineage.counters.generation
    new = transplant(found.folder, root, checkpoint=name, run=run, generation=generation, ledger_seq=seq, ledger_hash=hash_)
    tell(run_dir, Event.CHECKPOINT_IMPORTED, rule="checkpoint import", fields=_imported(new, origin))
    began_s = time.monotonic()
    damage = verify_files(root / name, expected_hash=new.hash)
    fields: dict[str, Any] = {"id": name, "host": socket.gethostname(), "wall_s": round(time.monotonic() - began_s, 3)}
    if damage:
        tell(run_dir, Event.CHECKPOINT_DAMAGED, fields={**fields, "problems": damage})
        raise Corrupt(f"the copy is damaged: {describe(damage[0])}", where=str(root / name), hint="look at the disk, then import again")
    tell(run_dir, Event.CHECKPOINT_VERIFIED, fields={**fields, "num_files": len(new.files), "num_bytes": num_bytes(new)})
    return new


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


def _chosen(run_dir: Path, wanted: str) -> Found:
    """By step: the newest one there on the present line that is not suspect. By id: whichever is there."""
    if not wanted:
        return find(run_dir)
    lineage, root = lineage_of(run_dir), run_dir / CHECKPOINTS_NAME
    there = [ref for ref in lineage.refs if manifest_or_none(root / ref.id) is not None]
    if wanted.isdecimal():
        fitting = [ref for ref in there if ref.step == int(wanted) and not ref.abandoned and not ref.suspect]
    else:
        fitting = [ref for ref in there if ref.id == wanted]
    if not fitting:
        what = f"no checkpoint of step {wanted} on the present line" if wanted.isdecimal() else f"no checkpoint {wanted!r}"
        raise ConfigError(
            what,
            where=str(run_dir),
            hint=f"there are {_listed(there) or 'none'}"
            if parse_id(wanted) or wanted.isdecimal()
            else "--from takes a step such as 500, or an id such as s500-a1",
        )
    return find(root / fitting[-1].id)


def _listed(refs: list[CheckpointRef]) -> str:
    shown = [ref.id for ref in refs[-8:]]
    return ", ".join(["...", *shown] if len(refs) > len(shown) else shown)


def _new_run(found: Found, run_dir: Path, new_dir: Path, overrides: tuple[str, ...]) -> Manifest:
    """Built beside its place and put there by one rename: a branch is whole or absent."""
    from surefoot.config import load_config, resolved_toml
    from surefoot.core.identity import code_hashes, diff_sections, section_hashes

    parent = load_config(run_dir / CONFIG_NAME)
    own = (f"run.dir={new_dir.absolute()}", f"run.name={new_dir.name}")
    loaded = load_config(run_dir / CONFIG_NAME, (*own, *overrides))
    if Path(loaded.config.run.dir) != new_dir.absolute():
        raise ConfigError("the folder of the branch is given by --dir", where="run.dir", hint="leave run.dir out of the overrides")
    source = read_manifest(found.folder)
    changes = diff_sections(parent.config, loaded.config)
    _refuse_what_does_not_fit(changes, step=source.step, num_steps=loaded.config.train.num_steps)
    hashes = section_hashes(loaded.config) | code_hashes(loaded.config)
    building = new_dir.absolute().with_name(f".{new_dir.name}.branching")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        write_atomic(building / CONFIG_NAME, resolved_toml(loaded, new_dir.absolute()))

        def note(origin: Origin) -> None:
            tell(building, Event.RUN_CREATED, fields={"config_hashes": hashes})
            fields: dict[str, object] = {"from_run": origin.run, "checkpoint": origin.checkpoint, "state_digest": source.state_digest}
            fields |= {
                "step": source.step,
                "manifest": origin.manifest_hash,
                "ledger_seq": source.ledger_seq,
                "ledger_hash": source.ledger_hash,
            }
            tell(building, Event.RUN_BRANCHED, rule="checkpoint branch", reason=" ".join(overrides), fields=fields)
            for section in (name for name in hashes if source.config_hashes.get(name) != hashes[name]):
                words = ", ".join(f"[{where}] {key} was {old!r}, is {now!r}" for where, key, old, now in changes if where == section)
                fields = {"section": section, "hash": hashes[section]}
                tell(building, Event.CONFIG_ACCEPTED, rule="checkpoint branch", reason=words, fields=fields)

        new = take_in(found, building, run=loaded.config.run.name, note=note)
        if new_dir.is_dir():
            new_dir.rmdir()  # it is empty
        os.rename(building, new_dir)
        fsync_dir(new_dir.absolute().parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return new


def _refuse_what_does_not_fit(changes: list[tuple[str, str, object, object]], *, step: int, num_steps: int) -> None:
    fixed = [f"[{section}] {key}" for section, key, _, _ in changes if (section, key) in {("run", "seed"), ("data", "seq_len")}]
    if fixed:
        what = f"{', '.join(fixed)} decides the order of samples: no checkpoint of another value fits"
        raise ConfigError(what, where="overrides", hint="leave it as it was, or start a run from step 0")
    if num_steps <= step:
        what = f"train.num_steps = {num_steps}, and the checkpoint is at step {step}: nothing would be trained"
        raise ConfigError(what, where="overrides", hint=f"give train.num_steps={step + max(1, step // 5)} or more")


def _name_of(run_dir: Path) -> str:
    import tomllib

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
    from surefoot.core.identity import code_hashes, section_hashes

    config = load_config(run_dir / CONFIG_NAME).config
    hashes: Mapping[str, str] = section_hashes(config) | code_hashes(config)
    return [section for section in hashes if manifest.config_hashes.get(section) != hashes[section]]
