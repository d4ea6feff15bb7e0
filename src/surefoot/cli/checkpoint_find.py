"""Which checkpoint a person means by a run folder or a checkpoint folder, and what is known about it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot.checkpoint.inspect import published, read_ref
from surefoot.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, parse_id, read_manifest
from surefoot.core.errors import CheckpointError, ConfigError
from surefoot.core.records import CheckpointRef, Manifest, Problem
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import Lineage, adoptable, fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME, is_run

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint folder. `run_dir` and `ref` are those of the run whose ledger knows it; None for a bare copy."""

    folder: Path
    run_dir: Path | None = None
    ref: CheckpointRef | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def id(self) -> str:
        return self.ref.id if self.ref else self.folder.name


def find(path: Path) -> Found:
    """What `path` means: a checkpoint folder, or the newest checkpoint of a run folder. `problems`: what its ledger finds wrong at once."""
    if not path.is_dir():
        raise ConfigError("no such folder", where=str(path), hint="give a run folder, as in runs/quickstart, or a checkpoint folder in it")
    if is_run(path):
        return _of_run(path)
    if parse_id(path.name) is None and not any((path / name).exists() for name in (MANIFEST_NAME, METADATA_NAME)):
        raise ConfigError("neither a run folder nor a checkpoint folder", where=str(path), hint="see `surefoot checkpoint list RUN`")
    run_dir = path.absolute().parent.parent
    if path.absolute().parent.name != CHECKPOINTS_NAME or not is_run(run_dir):
        return Found(path)
    run_dir = path.parent.parent if len(path.parts) >= 2 else run_dir
    ref = lineage_of(run_dir).ref(path.name)
    return Found(path, run_dir, ref, _compared(path, ref)) if ref else Found(path)


def lineage_of(run_dir: Path) -> Lineage:
    """As far as the ledger can be read: what is damaged in it is for `surefoot ledger --verify` to say."""
    return fold_lineage(read_ledger(run_dir / LEDGER_NAME, up_to_damage=True))


def manifest_or_none(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def unledgered(root: Path, lineage: Lineage) -> list[Manifest]:
    """Checkpoints that were published by a process which died before it could say so; the next start adopts them."""
    return adoptable([manifest for name in published(root) if (manifest := manifest_or_none(root / name))], lineage)


def describe(problem: Problem) -> str:
    return " ".join(part for part in (problem.kind, problem.file, problem.tensor, f"({problem.detail})" if problem.detail else "") if part)


def as_json(problem: Problem) -> Mapping[str, str]:
    return {"kind": problem.kind, "file": problem.file, "tensor": problem.tensor, "detail": problem.detail}


def _of_run(run_dir: Path) -> Found:
    root, lineage = run_dir / CHECKPOINTS_NAME, lineage_of(run_dir)
    waiting = unledgered(root, lineage)
    if waiting:
        return Found(root / waiting[-1].id, run_dir, read_ref(root / waiting[-1].id))
    ref = lineage.newest()
    if ref is None:
        raise ConfigError("this run has no checkpoint yet", where=str(run_dir), hint="a run saves every checkpoint.interval_steps steps")
    return Found(root / ref.id, run_dir, ref, _compared(root / ref.id, ref))


def _compared(folder: Path, ref: CheckpointRef) -> tuple[Problem, ...]:
    """Another checkpoint, whole in itself, may stand under the name: only the ledger knows."""
    manifest = manifest_or_none(folder)
    if manifest is None or manifest.state_digest == ref.state_digest:
        return ()
    detail = f"state_digest {manifest.state_digest}, the ledger says {ref.state_digest}"
    return (Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=detail),)
