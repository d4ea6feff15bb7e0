"""DCP storage writer: hashes what it writes while it writes, checks that all of it was written, makes it durable."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from surefoot.checkpoint.metadata import find_holes, tensor_metadata
from surefoot.checkpoint.planner import DigestingSavePlanner
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import CheckpointError, Incomplete
from surefoot.core.records import ManifestFile, ManifestTensor
from surefoot.core.units import show_bytes
from surefoot.tensors.digest import as_hex, combine

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class DigestedWriteResult(WriteResult):
    """A WriteResult that also says what the written part was and which file it went to. It rides DCP's own gather to rank 0."""

    digest: int
    file: ManifestFile


class _HashingStream(io.RawIOBase):
    """A file that is written strictly forward: counts and hashes on the way, and remembers the first error of the system."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._hash.update(data)
        num_bytes = len(memoryview(data).cast("B"))
        self.num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self.num_bytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        pass  # torch flushes after every tensor; one flush at the end is enough

    def finish(self) -> str:
        """Flush, make durable, and return the checksum. Flushed first: stock DCP up to 2.13 syncs a file before its buffer is out."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.error = self.error or error
            raise
        return str(self._hash.hexdigest())

    def abandon(self) -> None:
        """Close without a second error from what is still buffered."""
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error


class HashingFileSystem(FileSystem):
    """Files of one fresh folder that rank 0 made; `files` holds name, size and checksum of each finished one."""

    def __init__(self) -> None:
        self.files: dict[str, ManifestFile] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        path = Path(path)
        if mode != "wb":
            raise ValueError(f"a writer does not open files as {mode!r}")
        stream = _HashingStream(path)
        try:
            yield stream
            self.files[path.name] = ManifestFile(name=path.name, num_bytes=stream.num_bytes, xxh3_128=stream.finish())
        finally:
            stream.abandon()
            self.error = self.error or stream.error

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        old, new = Path(path), Path(new_path)
        old.rename(new)
        file = self.files.pop(old.name)
        self.files[new.name] = ManifestFile(name=new.name, num_bytes=file.num_bytes, xxh3_128=file.xxh3_128)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        if not Path(path).is_dir():
            raise Incomplete("the folder that rank 0 made is not here", where=str(path), hint="checkpoints need a shared file system")


class Writer(FileSystemWriter):
    """Writes one checkpoint into the fresh folder `path`. One thread: stock DCP loses what other threads raise.

    After the save, on rank 0, `tensors` and `files` hold what the manifest needs.
    """

    def __init__(self, path: Path, *, needed_bytes: int) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.tensors: tuple[ManifestTensor, ...] = ()
        self.files: tuple[ManifestFile, ...] = ()
        self._folder = path
        self._needed_bytes = needed_bytes

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # stock DCP pickles the absolute path here; a checkpoint must not know where it lies

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, DigestingSavePlanner)
        if not plan.items:
            return _done([])  # stock DCP would leave an empty file
        with self._named_errors():
            written = super().write_data(plan, planner).wait()
        if lost := sorted({item.index.fqn for item in plan.items} - {result.index.fqn for result in written}):
            raise Incomplete(f"{len(lost)} tensors were not written", where=lost[0], tensors=lost)
        return _done([self._digested(result, planner) for result in written])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result for rank_results in results for result in rank_results}
        for key in metadata.state_dict_metadata:
            if holes := find_holes(key, tensor_metadata(metadata, key), written):
                raise Incomplete(holes[0].detail, where=key)
        with self._named_errors():
            super().finish(metadata, results)
        files = {result.file.name: result.file for result in written.values() if isinstance(result, DigestedWriteResult)}
        self.files = tuple(sorted((files | self.fs.files).values(), key=lambda file: file.name))
        self.tensors = _manifest_tensors(metadata, written.values())

    def _digested(self, result: WriteResult, planner: DigestingSavePlanner) -> DigestedWriteResult:
        return DigestedWriteResult(
            index=result.index,
            size_in_bytes=result.size_in_bytes,
            storage_data=result.storage_data,
            digest=planner.digests[result.index],
            file=self.fs.files[result.storage_data.relative_path],
        )

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """What went wrong in words: torch turns a full disk into 'unexpected pos', so the stream's own error is told instead."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            raise storage_error(self.fs.error or error, folder=self._folder, needed_bytes=self._needed_bytes) from error


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


def _manifest_tensors(metadata: Metadata, results: Any) -> tuple[ManifestTensor, ...]:
    parts: dict[str, list[int]] = {key: [] for key in metadata.state_dict_metadata}
    for result in results:
        parts[result.index.fqn].append(result.digest)
    return tuple(
        ManifestTensor(key=key, dtype=dtype_name(entry.properties.dtype), shape=tuple(entry.size), digest=as_hex(combine(parts[key])))
        for key in sorted(parts)
        if (entry := tensor_metadata(metadata, key))
    )


def _done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future
