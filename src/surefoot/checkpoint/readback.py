"""Read a published checkpoint back from storage: are its bytes those that were written? No torch, so the uploader can ask.

What the bytes mean, tensor by tensor, is for `verify`.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path

import xxhash

from surefoot.checkpoint.manifest import MANIFEST_NAME, read_manifest
from surefoot.checkpoint.sources import FolderSource, check_bytes
from surefoot.core.errors import CheckpointError, Incomplete
from surefoot.core.records import Manifest, ManifestFile, Problem

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20


def verify_files(path: Path, *, expected_hash: str | None = None, from_storage: bool = True) -> list[Problem]:
    """Local. Everything that is wrong with manifest, listing and checksums of the checkpoint folder `path`; reads every byte.

    `expected_hash` is the hash of the manifest that was written. With `from_storage` the page cache is dropped first, as far as the system
    lets it, and gone around where the file system takes that, so that it is the disk that answers.
    """
    if from_storage and path.is_dir():
        drop_cached(path)
    try:
        manifest = read_manifest(path)
    except Incomplete as error:
        return [Problem(kind="missing-file", file=MANIFEST_NAME, detail=error.what)]
    except (CheckpointError, OSError) as error:
        return [Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=error.what if isinstance(error, CheckpointError) else str(error))]
    if expected_hash not in (None, manifest.hash):
        return [Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=f"hash {manifest.hash}, written {expected_hash}")]
    problems = check_listing(path, manifest)
    unusable = {problem.file for problem in problems}
    files = [file for file in manifest.files if file.name not in unusable]
    if from_storage:
        with StorageSource(path) as storage:
            return problems + [problem for file in files if (problem := check_bytes(file, storage)) is not None]
    with FolderSource(path) as folder:
        return problems + [problem for file in files if (problem := check_bytes(file, folder)) is not None]


class StorageSource:
    """The files of a folder as storage has them: read past the page cache where the file system takes that. Close it, or use a `with`."""

    name = "disk"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages = mmap.mmap(
            -1, READ_BYTES
        )  # such reads want whole pages, and touching fresh ones for each would cost more than they do
        self._view = memoryview(self._pages)

    def has(self, file: ManifestFile) -> bool:
        return (self._folder / file.name).is_file()

    def read_into(self, file: ManifestFile, *, offset: int, buffer: memoryview) -> None:
        with FolderSource(self._folder) as folder:
            folder.read_into(file, offset=offset, buffer=buffer)

    def checksum(self, file: ManifestFile) -> str:
        """xxh3_128 over as many bytes as the manifest says."""
        fd, direct = _open_direct(self._folder / file.name)
        digest = xxhash.xxh3_128()
        done = 0
        try:
            while done < file.num_bytes:
                try:
                    num_bytes = os.preadv(fd, [self._view], done)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    os.close(fd)  # it takes the flag but not this read
                    fd, direct = os.open(self._folder / file.name, os.O_RDONLY), False
                    continue
                if not num_bytes:
                    raise Incomplete(f"it ends at byte {done}", where=file.name)
                taken = min(num_bytes, file.num_bytes - done)
                digest.update(self._view[:taken])
                done += taken
        finally:
            os.close(fd)
        return str(digest.hexdigest())

    def close(self) -> None:
        self._view.release()
        self._pages.close()

    def __enter__(self) -> StorageSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_direct(path: Path) -> tuple[int, bool]:
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, os.O_RDONLY), False


def check_listing(path: Path, manifest: Manifest) -> list[Problem]:
    """Names and sizes of the files: nothing missing, nothing more."""
    present = {entry.name: entry.stat().st_size if entry.is_file() else -1 for entry in path.iterdir()}
    expected = {file.name: file.num_bytes for file in manifest.files}
    problems = []
    for name in sorted(expected.keys() | present.keys() - {MANIFEST_NAME}):
        if name not in present:
            problems.append(Problem(kind="missing-file", file=name, detail=f"{expected[name]} bytes were written"))
        elif name not in expected:
            problems.append(Problem(kind="extra-file", file=name, detail="the manifest does not know it"))
        elif present[name] != expected[name]:
            problems.append(Problem(kind="wrong-size", file=name, detail=f"{present[name]} bytes, {expected[name]} were written"))
    return problems


def check_file(path: Path, file: ManifestFile) -> Problem | None:
    """Whether the bytes of one file of the folder are those that were written."""
    with FolderSource(path) as folder:
        return check_bytes(file, folder)


def drop_cached(path: Path) -> None:
    """Ask the system to forget what it has in memory of the files in the folder `path`; what was not written yet is written first.

    A system that refuses says nothing about the bytes: the read that follows finds out what is there. After a failed write the memory has
    what the disk lacks, so that is forgotten too.
    """
    for entry in sorted(path.iterdir()) if hasattr(os, "posix_fadvise") else ():
        if entry.is_file():
            fd = os.open(entry, os.O_RDONLY)
            try:
                try:
                    os.fsync(fd)
                except OSError as error:
                    logger.warning("%s: what the disk has of it is read now: %s", entry, error)
                with suppress(OSError):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
