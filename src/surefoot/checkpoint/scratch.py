"""The folder that a checkpoint is written into, and the commit: one rename. No torch.

checkpoints/.<id>.g<generation>.writing/   being written; never read, swept by a later generation
    __<rank>_0.distcp                      the image of a rank, durable
    __<rank>_0.part.json                   its record, written after it: who wrote what, with checksum and digests. The leader unlinks the
                                           records before it commits; who unlinked one has the part
checkpoints/<id>/                          published: whole, durable, never written to again
"""

from __future__ import annotations

import base64
import errno
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from surefoot.checkpoint.manifest import (
    DIGESTED_PREFIXES,
    EXTRAS_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    METADATA_NAME,
    checksum_bytes,
    manifest_bytes,
    manifest_from_json,
    parse_id,
    sealed,
)
from surefoot.checkpoint.slot import PAGE_BYTES, SlotHeader
from surefoot.core.durable import fsync_dir, write_atomic
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete
from surefoot.core.records import Manifest, ManifestFile, ManifestTensor
from surefoot.core.strict_json import canonical, loads
from surefoot.core.units import show_bytes
from surefoot.tensors.digest_sum import as_hex, combine, state_digest

logger = logging.getLogger(__name__)

WRITE_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def scratch_folder(root: Path, checkpoint: str, *, generation: int) -> Path:
    return root / f".{checkpoint}.g{generation}.writing"


def part_name(rank: int) -> str:
    return f"__{rank}_0.part.json"


def begin_folder(root: Path, scratch: Path, *, checkpoint: str, index: Mapping[str, Any], again: bool = False) -> None:
    """Refuse before a byte is written: a malformed or existing id, too little room."""
    if parse_id(checkpoint) is None:
        raise CheckpointError("a checkpoint id is s<step>-a<attempt>[-r<retry>]", where=checkpoint)
    if (root / checkpoint).exists():
        raise CheckpointError(
            "this checkpoint exists already", where=str(root / checkpoint), hint="published checkpoints are never rewritten"
        )
    needed = int(index["job_bytes"])
    free = free_bytes(root)
    if free < needed:
        raise CheckpointError(
            f"too little room for a checkpoint: it needs {show_bytes(needed)}, {show_bytes(free)} are free",
            where=str(root),
            hint="free disk space or lower checkpoint.keep_last; older checkpoints are untouched",
            needed_bytes=needed,
            free_bytes=free,
        )
    root.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(exist_ok=again)


def write_image(path: Path, image: memoryview, *, direct: bool = True, again: bool = False) -> str:
    """Write and make durable; the checksum of what was written. Past the page cache where the file system takes that.

    A file that is there is an error. With `again` the same bytes may be in it already, and stay there all the time: somebody may count on
    them.
    """
    fd, direct = _create(path, direct=direct, again=again)
    try:
        digest = xxhash.xxh3_128()
        for start in range(0, len(image), WRITE_BYTES):
            piece = image[start : start + WRITE_BYTES]
            digest.update(piece)
            done = 0
            while done < len(piece):
                try:
                    done += os.pwrite(fd, piece[done:], start + done)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    refused = True
                else:
                    refused = direct and done % PAGE_BYTES != 0
                if refused:  # the file system takes the flag but not this write, or ended a write within a page
                    refusing, fd, direct = fd, os.open(path, os.O_WRONLY), False
                    os.close(refusing)
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)
    return str(digest.hexdigest())


def write_record(scratch: Path, file: ManifestFile, *, header: SlotHeader, parts: Iterable[Mapping[str, Any]]) -> None:
    """Tell the leader that this rank's part is whole and durable."""
    record = {
        "id": header.id,
        "rank": header.rank,
        "world_size": header.world_size,
        "host": file.host,
        "file": file.name,
        "num_bytes": file.num_bytes,
        "xxh3_128": file.xxh3_128,
        "digests": [[part["key"], part["digest"]] for part in parts],
    }
    write_atomic(scratch / part_name(header.rank), canonical(record), durable=False)


def publish(root: Path, scratch: Path, *, index: Mapping[str, Any], header: SlotHeader, newest: Manifest | None = None) -> Manifest:
    """The commit: everything that is written once per job, the manifest last, one rename. The sealed manifest.

    `newest` is what this uploader committed last: the parent, when the rank could not know of it yet.
    """
    records = [_read_record(scratch, rank, header=header) for rank in range(header.world_size)]
    _check_whole(records, stored=index["stored"], where=header.id)
    metadata, extras = base64.b64decode(index["metadata"]), str(index["extras"]).encode()
    files = [ManifestFile(r["file"], r["num_bytes"], r["xxh3_128"], r["rank"], r["host"]) for r in records]
    files += [ManifestFile(name, len(raw), checksum_bytes(raw)) for name, raw in ((METADATA_NAME, metadata), (EXTRAS_NAME, extras))]
    tensors = _tensors(index["tensors"], records)
    draft = manifest_from_json(index["draft"])
    if newest is not None and (newest.run, newest.attempt) == (draft.run, draft.attempt):
        draft = replace(draft, parent=newest.id)
    manifest = sealed(
        replace(
            draft,
            format_version=FORMAT_VERSION,
            files=tuple(sorted(files, key=lambda file: file.name)),
            tensors=tensors,
            state_digest=state_digest(tensor for tensor in tensors if tensor.key.startswith(DIGESTED_PREFIXES)),
        )
    )
    for rank in range(header.world_size):
        _take(scratch / part_name(rank))
    for left in scratch.glob(".*.tmp"):
        left.unlink(missing_ok=True)  # of an uploader that was killed while it wrote a small file; nobody writes here any more
    write_atomic(scratch / METADATA_NAME, metadata)
    write_atomic(scratch / EXTRAS_NAME, extras)
    write_atomic(scratch / MANIFEST_NAME, manifest_bytes(manifest))  # last: what it names is durable before the rename
    os.rename(scratch, root / header.id)
    fsync_dir(root)
    return manifest


def withdraw(scratch: Path, header: SlotHeader, *, may_be_taken: bool) -> None:
    """Take this rank's part out of a save, unless its commit has begun. Its record is unlinked once: by the leader, or here.

    `may_be_taken`: a record was, or may have been, written. Without one the image is nobody's yet.
    """
    try:
        if may_be_taken:
            (scratch / part_name(header.rank)).unlink()
        (scratch / header.file).unlink(missing_ok=True)
    except FileNotFoundError:
        logger.info("%s: rank 0's side has taken the part of rank %d, or given it up", header.id, header.rank)
    except OSError as error:
        logger.warning("what rank %d wrote of %s could not be removed: %s", header.rank, header.id, error)


def _take(record: Path) -> None:
    try:
        record.unlink()
    except FileNotFoundError as error:
        raise CheckpointError("given up: a part was withdrawn while it was committed", where=str(record)) from error


def storage_error(error: BaseException, *, folder: Path, needed_bytes: int) -> CheckpointError:
    """The error of a save that the system refused, with the bytes that it needs and those that are left."""
    if isinstance(error, CheckpointError):
        return error
    free = free_bytes(folder)
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    full = isinstance(error, OSError) and error.errno in _FULL
    return CheckpointError(
        f"the save failed: {text}; it needs {show_bytes(needed_bytes)}, {show_bytes(free)} are free",
        where=str(getattr(error, "filename", None) or folder),
        hint="free disk space or raise the quota; older checkpoints are untouched" if full else "older checkpoints are untouched",
        errno=error.errno if isinstance(error, OSError) else None,
        needed_bytes=needed_bytes,
        free_bytes=free,
    )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _create(path: Path, *, direct: bool, again: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | (0 if again else os.O_EXCL)
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if not again:
                path.unlink(missing_ok=True)  # some file systems make the file before they refuse the flag
    return os.open(path, flags, 0o666), False


def _read_record(scratch: Path, rank: int, *, header: SlotHeader) -> dict[str, Any]:
    path = scratch / part_name(rank)
    try:
        record: dict[str, Any] = loads(path.read_bytes())
    except ValueError as error:
        raise Corrupt(f"not valid JSON: {error}", where=str(path)) from error
    found, wanted = (record["id"], record["rank"], record["world_size"]), (header.id, rank, header.world_size)
    if found != wanted:
        raise Corrupt(f"it speaks of {found}, not of {wanted}", where=str(path))
    return record


def _check_whole(records: Sequence[Mapping[str, Any]], *, stored: Sequence[Sequence[str]], where: str) -> None:
    """Every part of the plan was written by the rank that the plan gave it to."""
    for rank, (record, keys) in enumerate(zip(records, stored, strict=True)):
        found = [key for key, _ in record["digests"]]
        if found != list(keys):
            lost = sorted(set(keys) - set(found)) or sorted(found)
            raise Incomplete(
                f"rank {rank} did not write what was planned: {len(found)} of {len(keys)} parts", where=where, tensors=lost[:5]
            )


def _tensors(tensors: Iterable[Sequence[Any]], records: Iterable[Mapping[str, Any]]) -> tuple[ManifestTensor, ...]:
    digests: dict[str, list[int]] = {}
    for record in records:
        for key, digest in record["digests"]:
            digests.setdefault(key, []).append(int(digest, 16))
    return tuple(ManifestTensor(key, dtype, tuple(shape), as_hex(combine(digests[key]))) for key, dtype, shape in tensors)
