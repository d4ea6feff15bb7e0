"""A checkpoint of one run as a checkpoint of another: the same files under a new manifest. No torch.

Its id is `s<step>-a0`: attempt 0 is before every attempt of the run that takes it in, so no id of its own can meet it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import xxhash

from surefoot.checkpoint.manifest import FORMAT_VERSION, MANIFEST_NAME, checkpoint_id, manifest_bytes, read_manifest, sealed
from surefoot.core.durable import fsync_dir, write_atomic
from surefoot.core.errors import CheckpointError, Corrupt
from surefoot.core.records import Manifest, ManifestFile

_CHUNK_BYTES = 1 << 22


def free_id(step: int, *, taken: Callable[[str], bool] | Collection[str]) -> str:
    """The id under which a checkpoint of that step comes in from outside."""
    is_taken = taken if callable(taken) else taken.__contains__
    retry = 0
    while is_taken(name := checkpoint_id(step, attempt=0, retry=retry)):
        retry += 1
    return name


def transplant(source: Path, root: Path, *, checkpoint: str, run: str, generation: int, ledger_seq: int, ledger_hash: str) -> Manifest:
    """Local. Publish the checkpoint folder `source` under `root` as `checkpoint` of the run `run`; its new manifest.

    Files are linked where the file system can (a published file is never written to again), else copied; a copy whose bytes are not those
    of the manifest raises Corrupt. Published by one rename; on an error nothing is left.
    """
    manifest = read_manifest(source)
    scratch = root / f".{checkpoint}.g{generation}.writing"
    new = sealed(
        replace(
            manifest,
            format_version=FORMAT_VERSION,
            id=checkpoint,
            run=run,
            attempt=0,
            generation=generation,
            parent=None,
            ledger_seq=ledger_seq,
            ledger_hash=ledger_hash,
        )
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        for file in manifest.files:
            _bring(source / file.name, scratch / file.name, file)
        write_atomic(scratch / MANIFEST_NAME, manifest_bytes(new))
        if (root / checkpoint).exists():
            raise CheckpointError("this checkpoint exists already", where=str(root / checkpoint))
        os.rename(scratch, root / checkpoint)
        fsync_dir(root)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(
            f"could not be copied: {error.strerror}", where=str(root), hint="is there room, and may you write there?"
        ) from error
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return new


def _bring(source: Path, target: Path, file: ManifestFile) -> None:
    try:
        os.link(source.resolve(), target)  # what a symbolic link leads to, and not the link: that may lead nowhere tomorrow
        return
    except OSError:  # another file system, or one without links: then a copy
        target.unlink(missing_ok=True)
    digest = xxhash.xxh3_128()
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    if digest.hexdigest() != file.xxh3_128:
        raise Corrupt("its bytes are not those that were written", where=str(source), hint="take another copy")
