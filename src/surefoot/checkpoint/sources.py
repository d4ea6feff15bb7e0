"""Where the bytes of a checkpoint's files come from: the memory of this host, its folder, another copy of the folder. No torch.

Sources are asked in order, file by file: the first whose bytes have the checksum of the manifest serves the file. A damaged one is named.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import xxhash

from surefoot.checkpoint.slot import Slot, SlotHeader, SlotState
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete
from surefoot.core.records import ManifestFile, Problem

Item = TypeVar("Item")

_NONE = object()
CHUNK_BYTES = 1 << 20
"""Read and hashed at once: stays in the cache of a core, and is long enough for a disk."""


class FileSource(Protocol):
    """One place that may hold the files of one checkpoint. `name` is said in errors: "memory", "disk", "s3://..."."""

    name: str

    def has(self, file: ManifestFile) -> bool:
        """Whether the place seems to hold this file; its bytes are not looked at."""
        ...

    def read_into(self, file: ManifestFile, *, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on. Raises CheckpointError or OSError. Called by several threads at once."""
        ...


@runtime_checkable
class ProvenParts(Protocol):
    """A source that knows what single parts were in the run: checksums taken while they were copied from the live tensors."""

    def part(self, file: ManifestFile, *, key: str, offsets: Sequence[int]) -> tuple[str, str] | None:
        """(xxh3_128, digest) of the part of the tensor `key` that starts at `offsets`, when it is known."""
        ...


@runtime_checkable
class HashesItself(Protocol):
    """A source with a cheaper way to the checksum of a whole file than `read_into`, piece by piece."""

    def checksum(self, file: ManifestFile) -> str:
        """xxh3_128 over as many bytes as the manifest says. Raises CheckpointError or OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Which source serves a file, and what was wrong with those before it. No source: `problems` says why."""

    source: FileSource | None
    problems: tuple[Problem, ...] = ()


class FolderSource:
    """The files of a folder: the checkpoint's own, or another copy. Close it, or use it in a `with`."""

    def __init__(self, folder: Path, *, name: str = "disk") -> None:
        self.folder = folder
        self.name = name
        self._fds: dict[str, int] = {}

    def has(self, file: ManifestFile) -> bool:
        return (self.folder / file.name).is_file()

    def read_into(self, file: ManifestFile, *, offset: int, buffer: memoryview) -> None:
        fd = self._fds.get(file.name)
        if fd is None:
            fd = self._open(file.name)
        done = 0
        while done < len(buffer):
            num_bytes = os.preadv(fd, [buffer[done:]], offset + done)
            if not num_bytes:
                raise Incomplete(f"it ends at byte {offset + done}", where=file.name)
            done += num_bytes

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> FolderSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str) -> int:
        fd = os.open(self.folder / name, os.O_RDONLY)
        if self._fds.setdefault(name, fd) != fd:
            os.close(fd)  # another thread was faster
        elif hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._fds[name]


class SlotSource:
    """What the slots of this host still hold of a checkpoint that is committed. The slots stay the caller's."""

    name = "memory"

    def __init__(self, slots: Iterable[Slot], *, checkpoint: str) -> None:
        self._held: dict[str, tuple[Slot, SlotHeader, memoryview]] = {}
        self._parts: dict[str, dict[tuple[str, tuple[int, ...]], tuple[str, str]]] = {}
        for slot in slots:
            header = slot.header()
            if slot.state() == SlotState.COMMITTED and header is not None and header.id == checkpoint:
                self._held[header.file] = slot, header, slot.image()

    def has(self, file: ManifestFile) -> bool:
        header = self._held[file.name][1] if file.name in self._held else None
        return header is not None and (header.image_xxh3_128, header.image_bytes) == (file.xxh3_128, file.num_bytes)

    def read_into(self, file: ManifestFile, *, offset: int, buffer: memoryview) -> None:
        slot, _, image = self._held[file.name]
        view = image[offset : offset + len(buffer)]
        if len(view) != len(buffer):
            raise Incomplete(f"it ends at byte {len(image)}", where=file.name)
        np.copyto(np.frombuffer(buffer, dtype=np.uint8), np.frombuffer(view, dtype=np.uint8))  # leaves the interpreter to other threads
        if slot.state() is not SlotState.COMMITTED:
            raise _taken(slot, file)

    def checksum(self, file: ManifestFile) -> str:
        slot, header, image = self._held[file.name]
        found = str(xxhash.xxh3_128_hexdigest(image))
        now = slot.header()
        if now is None or now.serial != header.serial:
            raise _taken(slot, file)
        return found

    def part(self, file: ManifestFile, *, key: str, offsets: Sequence[int]) -> tuple[str, str] | None:
        if file.name not in self._parts:
            self._parts[file.name] = _parts_of(self._held[file.name][0])
        return self._parts[file.name].get((key, tuple(offsets)))


def in_threads(work: Callable[[Item], object], items: Iterable[Item], *, num_threads: int) -> None:
    """Do the work on each item, on so many threads. The first error is raised when all have stopped."""
    waiting = iter(items)
    lock = threading.Lock()

    def take() -> None:
        while True:
            with lock:
                item = next(waiting, _NONE)
            if item is _NONE:
                return
            work(cast(Item, item))

    if num_threads == 1:
        take()
        return
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(take) for _ in range(num_threads)]:
            done.result()


def choose(file: ManifestFile, sources: Iterable[FileSource]) -> Choice:
    """Local. The first source whose bytes are those that were written."""
    problems: list[Problem] = []
    for source in sources:
        if not source.has(file):
            continue
        problem = check_bytes(file, source)
        if problem is None:
            return Choice(source, tuple(problems))
        problems.append(problem)
    return Choice(None, tuple(problems) or (Problem(kind="missing-file", file=file.name, detail=f"{file.num_bytes} bytes were written"),))


def check_bytes(file: ManifestFile, source: FileSource) -> Problem | None:
    """Local. What is wrong with a source's bytes of the file; reads all of them."""
    try:
        found = checksum(file, source)
    except OSError as error:
        return Problem(kind="unreadable", file=file.name, detail=f"{source.name}: {error}")
    except CheckpointError as error:
        return Problem(kind="unreadable", file=file.name, detail=f"{source.name}: {error.what}")
    if found != file.xxh3_128:
        return Problem(kind="wrong-checksum", file=file.name, detail=f"{source.name}: xxh3_128 {found}, written {file.xxh3_128}")
    return None


def checksum(file: ManifestFile, source: FileSource, *, chunk_bytes: int = CHUNK_BYTES) -> str:
    """xxh3_128 over as many bytes of the file as the manifest says."""
    if isinstance(source, HashesItself):
        return source.checksum(file)
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(chunk_bytes, file.num_bytes)))
    for offset in range(0, file.num_bytes, chunk_bytes):
        part = buffer[: min(chunk_bytes, file.num_bytes - offset)]
        source.read_into(file, offset=offset, buffer=part)
        digest.update(part)
    return str(digest.hexdigest())


def read_all(file: ManifestFile, source: FileSource) -> bytes:
    """The whole of a small file."""
    raw = bytearray(file.num_bytes)
    source.read_into(file, offset=0, buffer=memoryview(raw))
    return bytes(raw)


def is_shared(source: FileSource) -> bool:
    """Whether all ranks see the same bytes there, so that one of them may look for all. Memory is of one host."""
    return not isinstance(source, SlotSource)


def _taken(slot: Slot, file: ManifestFile) -> Corrupt:
    return Corrupt(f"{slot} was taken for another save while it was read", where=file.name)


def _parts_of(slot: Slot) -> dict[tuple[str, tuple[int, ...]], tuple[str, str]]:
    """Nothing when the index is not what the rank wrote: then the digests of the loaded tensors have to do."""
    try:
        parts = slot.index()["parts"]
        return {(part["key"], tuple(part["offsets"])): (part["xxh3"], part["digest"]) for part in parts}
    except (CheckpointError, KeyError, TypeError):
        return {}
