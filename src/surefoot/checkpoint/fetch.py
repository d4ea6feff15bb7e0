"""From somewhere else into a local folder: file by file, verified on the way, published by one rename when it is whole. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import xxhash

from surefoot.checkpoint.held import held
from surefoot.checkpoint.manifest import MANIFEST_NAME, checksum_file, parse_id, parse_manifest, read_manifest
from surefoot.checkpoint.object_store import ObjectStore
from surefoot.checkpoint.readback import check_listing
from surefoot.checkpoint.remote import RemoteSource, its_manifest, remote_newest
from surefoot.checkpoint.sources import FileSource
from surefoot.core.durable import fsync_dir, fsync_file, write_atomic
from surefoot.core.errors import CheckpointError, ConfigError, Corrupt
from surefoot.core.records import Manifest, ManifestFile
from surefoot.core.tiers import BadTier, StoreUrl, parse_store_url
from surefoot.core.units import show_bytes

_BUFFER_BYTES = 16 << 20


def fetch_for_resume(url: str, root: Path, *, expected_state_digest: str | None = None) -> Path:
    """Local. Bring the checkpoint at `url` into the checkpoints folder `root`; its folder `root/<id>`.

    `url` is <store>/<id>, or <store> alone for the one saved last there. One that is here already and whole is not fetched again; a
    damaged one is mended file by file. Raises ConfigError for a bad URL, Corrupt for one whose state digest is not the expected one, any
    other CheckpointError when it cannot be had or another holds its id.
    """
    store_url, checkpoint = split_resume_url(url)
    store = ObjectStore.open(store_url)
    return fetch(store, checkpoint or remote_newest(store), into=root, expected_state_digest=expected_state_digest)


def split_resume_url(url: str) -> tuple[StoreUrl, str | None]:
    """(store, id) of `<store>/<id>`; id None when the last part is none. Raises ConfigError, which repeats no secret."""
    try:
        place = parse_store_url(url)
    except BadTier as error:
        raise ConfigError(error.what, hint=error.hint) from None
    before, _, last = place.prefix.rpartition("/")
    if parse_id(last) is None:
        return place, None
    if place.scheme == "file" and not before:
        raise ConfigError("a checkpoint cannot stand in the root folder", where=url, hint="write file:///folder/<id>")
    return StoreUrl(place.scheme, place.bucket, before), last


def fetch(store: ObjectStore | str, checkpoint: str, *, into: Path, expected_state_digest: str | None = None) -> Path:
    """Local. Fetch a published remote checkpoint into the folder `into`; where it lies now. Raises CheckpointError."""
    source = RemoteSource(ObjectStore.open(store) if isinstance(store, str) else store, checkpoint)
    return assemble(source.manifest_bytes, [source], into=into, expected_state_digest=expected_state_digest)


def assemble(manifest_bytes: bytes, sources: Sequence[FileSource], *, into: Path, expected_state_digest: str | None = None) -> Path:
    """Local. Write the checkpoint of this manifest from `sources`, each file from the first that has its very bytes.

    The work is done in a hidden folder that is held meanwhile, swept afterwards like any unfinished save, and continued by a second call.
    What is published under this id already stays, if it is this checkpoint: only damaged files are replaced. Raises Corrupt when no source
    has the bytes of a file and, before anything is touched, when the state digest is not the expected one.
    """
    where = f"the manifest from {', '.join(source.name for source in sources)}"
    manifest = parse_manifest(manifest_bytes, where=where)
    if expected_state_digest is not None and manifest.state_digest != expected_state_digest:
        what = f"{manifest.id} there has state digest {manifest.state_digest}, the one that is wanted has {expected_state_digest}"
        raise Corrupt(what, where=where, hint="it is the copy of something else", kind="wrong-digest")
    target = into / manifest.id
    _refuse_other(target, manifest)
    if (
        target.is_dir()
        and not check_listing(target, manifest)
        and all(is_whole(target / file.name, file) for file in (*manifest.files, its_manifest(manifest_bytes)))
    ):
        return target
    scratch, aside = into / f".{manifest.id}.g0.writing", into / f".{manifest.id}.g0.retired"
    try:
        with held(scratch):
            _fill(scratch, manifest, sources, beside=target)
            write_atomic(scratch / MANIFEST_NAME, manifest_bytes)
            if target.exists():
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(target, aside)
            os.rename(scratch, target)
            fsync_dir(into)
    except OSError as error:
        raise CheckpointError(f"could not be written: {error}", where=str(into), hint="free disk space or mend its rights") from error
    shutil.rmtree(aside, ignore_errors=True)
    return target


def _fill(scratch: Path, manifest: Manifest, sources: Sequence[FileSource], *, beside: Path) -> None:
    try:
        _make_room(scratch, manifest)
        for file in manifest.files:
            _bring(file, sources, scratch=scratch, beside=beside)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _refuse_other(target: Path, manifest: Manifest) -> None:
    """One whose manifest cannot be read is taken for a damaged copy: it is replaced."""
    try:
        local = read_manifest(target)
    except CheckpointError:
        return
    if local.hash != manifest.hash:
        raise CheckpointError(
            f"another checkpoint stands there under this id: manifest {local.hash[:12]}, the other is {manifest.hash[:12]}",
            where=str(target),
            hint="move it away, or resume into another [run] dir",
            kind="conflict",
        )


def _make_room(scratch: Path, manifest: Manifest) -> None:
    """The hidden folder, with nothing in it but files of this checkpoint that an earlier call brought; enough room for the rest."""
    names = {file.name for file in manifest.files}
    for entry in scratch.iterdir():
        if entry.name not in names:
            entry.unlink()
    needed = sum(file.num_bytes for file in manifest.files if not (scratch / file.name).exists())
    free = shutil.disk_usage(scratch).free
    if free < needed:
        raise OSError(f"the checkpoint needs {show_bytes(needed)}, {show_bytes(free)} are free")


def is_whole(path: Path, file: ManifestFile) -> bool:
    """Whether the file at `path` holds the bytes that the manifest names."""
    try:
        return path.stat().st_size == file.num_bytes and checksum_file(path) == file.xxh3_128
    except OSError:
        return False


def _bring(file: ManifestFile, sources: Sequence[FileSource], *, scratch: Path, beside: Path) -> None:
    if is_whole(scratch / file.name, file):
        return
    if is_whole(beside / file.name, file):
        shutil.copyfile(beside / file.name, scratch / file.name)
        fsync_file(scratch / file.name)
        return
    told = []
    for source in sources:
        if not source.has(file):
            told.append(f"{source.name}: it is not there")
            continue
        try:
            found = _write(scratch / file.name, file, source)
        except CheckpointError as error:
            told.append(f"{source.name}: {error}")
            continue
        if found == file.xxh3_128:
            return
        told.append(f"{source.name}: xxh3_128 {found}, written {file.xxh3_128}")
    hint = "restore another checkpoint, or this one from another copy"
    raise Corrupt(f"{file.name} is whole nowhere: {'; '.join(told)}", where=beside.name, hint=hint, file=file.name, kind="wrong-checksum")


def _write(path: Path, file: ManifestFile, source: FileSource) -> str:
    """Write one file, made durable; the checksum of the bytes that came."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, file.num_bytes)))
    with path.open("wb") as opened:
        for offset in range(0, file.num_bytes, _BUFFER_BYTES):
            piece = buffer[: min(_BUFFER_BYTES, file.num_bytes - offset)]
            source.read_into(file, offset=offset, buffer=piece)
            digest.update(piece)
            opened.write(piece)
        opened.flush()
        os.fsync(opened.fileno())
    return str(digest.hexdigest())
