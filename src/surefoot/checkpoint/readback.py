"""Read a published checkpoint back from storage: are its bytes those that were written? No torch, so the uploader can ask.

What the bytes mean, tensor by tensor, is for `verify`.
"""

from __future__ import annotations

import os
from pathlib import Path

from surefoot.checkpoint.manifest import MANIFEST_NAME, read_manifest
from surefoot.checkpoint.sources import FolderSource, check_bytes
from surefoot.core.errors import CheckpointError, Incomplete
from surefoot.core.records import Manifest, ManifestFile, Problem


def verify_files(path: Path, *, expected_hash: str | None = None, from_storage: bool = True) -> list[Problem]:
    """Local. Everything that is wrong with manifest, listing and checksums of the checkpoint folder `path`; reads every byte.

    `expected_hash` is the hash of the manifest that was written. With `from_storage` the page cache is dropped first, as far as the system
    lets it, so that it is the disk that answers.
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
    with FolderSource(path) as folder:
        checked = (check_bytes(file, folder) for file in manifest.files if file.name not in unusable)
        return problems + [problem for problem in checked if problem is not None]


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
    """Ask the system to forget what it has in memory of the files in the folder `path`; what was not written yet is written first."""
    for entry in sorted(path.iterdir()) if hasattr(os, "posix_fadvise") else ():
        if entry.is_file():
            fd = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
