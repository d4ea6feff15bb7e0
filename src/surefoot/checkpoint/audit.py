"""What can be said about a checkpoint that surefoot did not write, without executing anything in it.

Stock DCP writes each part of a tensor as a zip with checksums that nobody reads: a flipped bit loads without a word. Here they are read.
Holes, overlaps, sizes and dtypes come from the folder's own `.metadata`. What cannot be checked is said, and is not counted as clean.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from surefoot.checkpoint.foreign import look_at_folder
from surefoot.checkpoint.manifest import EXTRAS_NAME, MANIFEST_NAME, METADATA_NAME, read_manifest
from surefoot.checkpoint.metadata import chunk_index, find_holes, parse_metadata
from surefoot.checkpoint.parts import Layout, read_layout
from surefoot.checkpoint.reader import listed
from surefoot.checkpoint.safetensors_audit import audit_safetensors
from surefoot.checkpoint.sources import CHUNK_BYTES, FolderSource
from surefoot.checkpoint.state import dtype_name
from surefoot.checkpoint.verify import verify
from surefoot.checkpoint.zip_slice import ZipSlice
from surefoot.core.errors import CheckpointError, Corrupt
from surefoot.core.records import ManifestFile, Problem
from surefoot.core.units import show_bytes

_NUM_THREADS = 2
"""zlib's checksum does 4 GB/s on one core: more threads would only wait for the disk."""
_PAYLOAD = "data/0"


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found in the folder `path`, which is `kind` in words.

    `unread` are keys of pickled objects, which are never read. `num_checked` of the `num_parts` stored parts carry a checksum of their own
    and were compared with it. `notes` say what could not be checked, and why.
    """

    path: Path
    kind: str
    problems: tuple[Problem, ...]
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_files: int = 0
    num_tensors: int = 0
    num_parts: int = 0
    num_checked: int = 0
    num_bytes: int = 0

    @property
    def clean(self) -> bool:
        """Nothing is wrong, and every part was compared with a checksum."""
        return not self.problems and self.num_checked == self.num_parts

    def summary(self) -> str:
        """One line for people."""
        counts = f"{self.num_files} files, {self.num_tensors} tensors in {self.num_parts} parts, {show_bytes(self.num_bytes)}"
        state = (
            "clean" if self.clean else f"{len(self.problems)} problems" if self.problems else "no problem found, not all could be checked"
        )
        return f"{self.kind}: {counts}; {self.num_checked} parts match their checksums; {state}"


def audit(path: Path) -> Audit:
    """Local. Look at the checkpoint folder `path`, whoever wrote it; reads every byte, holds little of it in memory.

    Raises Incompatible, with a sentence that says what it is, for folders that cannot be looked at without executing code from them.
    """
    kind = look_at_folder(path)
    if kind == "surefoot":
        return _audit_own(path)
    if kind == "safetensors":
        found = audit_safetensors(path)
        return Audit(path=path, kind="safetensors", **found)
    return _audit_dcp(path)


def read_foreign_metadata(path: Path) -> Metadata:
    """`.metadata` as stock DCP writes it. Raises Corrupt; executes nothing."""
    file = path / METADATA_NAME
    return parse_metadata(file.read_bytes(), where=str(file), foreign=True)


def _audit_own(path: Path) -> Audit:
    problems = tuple(verify(path))
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return Audit(path=path, kind="a surefoot checkpoint", problems=problems)
    hit = {problem.tensor for problem in problems}
    return Audit(
        path=path,
        kind="a surefoot checkpoint",
        problems=problems,
        num_files=len(manifest.files),
        num_tensors=len(manifest.tensors),
        num_parts=len(manifest.tensors),
        num_checked=sum(tensor.key not in hit for tensor in manifest.tensors),
        num_bytes=sum(file.num_bytes for file in manifest.files),
    )


def _audit_dcp(path: Path) -> Audit:
    is_own = (path / EXTRAS_NAME).is_file()
    kind = "a surefoot checkpoint without its manifest" if is_own else "a stock DCP checkpoint"
    if not (path / METADATA_NAME).is_file():
        detail = "no list of what is stored: the save never ended, or the file is lost"
        return Audit(path=path, kind=kind, problems=(Problem(kind="missing-file", file=METADATA_NAME, detail=detail),))
    try:
        metadata = read_foreign_metadata(path)
    except CheckpointError as error:
        return Audit(path=path, kind=kind, problems=(Problem(kind="unreadable", file=METADATA_NAME, detail=error.what),))
    files = listed(path, metadata)
    problems = [*_missing_commit(is_own), *_structure(path, metadata, files, known={EXTRAS_NAME} if is_own else set())]
    with FolderSource(path) as folder:
        auditor = _PartAuditor(files, folder, metadata)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            looks = list(pool.map(lambda stored: auditor.look(*stored), _readable(metadata, files)))
    problems += [look.problem for look in looks if look.problem is not None]
    num_unchecked = sum(not look.has_checksum and look.problem is None for look in looks)
    num_stored = sum(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values())
    return Audit(
        path=path,
        kind=kind,
        problems=tuple(problems),
        unread=tuple(sorted(key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata))),
        notes=_notes(num_unchecked, len(looks)),
        num_files=len(files) + 1,
        num_tensors=num_stored,
        num_parts=len(looks),
        num_checked=sum(look.has_checksum and look.problem is None for look in looks),
        num_bytes=sum(file.num_bytes for file in files.values()),
    )


def _missing_commit(is_own: bool) -> list[Problem]:
    detail = "the save never ended, or its commit record is lost: nothing says which bytes were written"
    return [Problem(kind="missing-file", file=MANIFEST_NAME, detail=detail)] if is_own else []


def _notes(num_unchecked: int, num_parts: int) -> tuple[str, ...]:
    if not num_unchecked:
        return ()
    return (f"{num_unchecked} of {num_parts} parts carry no checksum: a changed bit in them would not be seen",)


def _structure(path: Path, metadata: Metadata, files: Mapping[str, ManifestFile], *, known: set[str]) -> list[Problem]:
    """What `.metadata` and the list of files say without a look into the files."""
    named = {info.relative_path for info in metadata.storage_data.values()}
    problems = [
        Problem(kind="missing-file", file=name, tensor=_first_in(metadata, name), detail="it holds tensors")
        for name in sorted(named - files.keys())
    ]
    extra = sorted(entry.name for entry in path.iterdir() if entry.name not in named | known | {METADATA_NAME})
    problems += [Problem(kind="extra-file", file=name, detail=".metadata does not name it") for name in extra]
    for key, entry in sorted(metadata.state_dict_metadata.items()):
        if isinstance(entry, TensorStorageMetadata):
            problems += find_holes(key, entry, metadata.storage_data)
        elif MetadataIndex(key) not in metadata.storage_data:
            problems.append(Problem(kind="hole", tensor=key, detail="a pickled object that was never written"))
    unknown = sorted({index.fqn for index in metadata.storage_data} - metadata.state_dict_metadata.keys())
    problems += [Problem(kind="extra-tensor", tensor=key, detail="bytes are stored of something that is not described") for key in unknown]
    return [*problems, *_slices(metadata, files)]


def _slices(metadata: Metadata, files: Mapping[str, ManifestFile]) -> list[Problem]:
    """Ranges of bytes that lie outside of their files, or on top of each other."""
    problems = []
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in metadata.storage_data.items():
        file = files.get(info.relative_path)
        if file is not None and not 0 <= info.offset < info.offset + info.length <= file.num_bytes:
            detail = f"bytes {info.offset} to {info.offset + info.length} of a file of {file.num_bytes}"
            problems.append(Problem(kind="hole", file=file.name, tensor=index.fqn, detail=detail))
        ranges.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length, index.fqn))
    for name, spans in ranges.items():
        end, before = 0, ""
        for start, stop, key in sorted(spans):
            if start < end:
                problems.append(Problem(kind="unreadable", file=name, tensor=key, detail=f"its bytes overlap those of {before}"))
            if stop > end:
                end, before = stop, key
    return sorted(problems, key=lambda problem: (problem.file, problem.tensor))


def _readable(metadata: Metadata, files: Mapping[str, ManifestFile]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    """The stored parts whose range of bytes exists, in the order in which they lie."""
    inside = [
        (index, info)
        for index, info in metadata.storage_data.items()
        if (file := files.get(info.relative_path)) is not None and 0 <= info.offset < info.offset + info.length <= file.num_bytes
    ]
    yield from sorted(inside, key=lambda stored: (stored[1].relative_path, stored[1].offset))


def _first_in(metadata: Metadata, name: str) -> str:
    return min((index.fqn for index, info in metadata.storage_data.items() if info.relative_path == name), default="")


@dataclass(frozen=True, slots=True)
class _Look:
    problem: Problem | None
    has_checksum: bool


class _PartAuditor:
    """Looks at single stored parts. For several threads at once."""

    def __init__(self, files: Mapping[str, ManifestFile], folder: FolderSource, metadata: Metadata) -> None:
        self._files = files
        self._folder = folder
        self._metadata = metadata
        self._boxes = {
            chunk_index(key, chunk): (entry.properties.dtype, tuple(chunk.sizes))
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def look(self, index: MetadataIndex, info: _StorageInfo) -> _Look:
        """Structure, dtype, shape, size and checksums of one part."""
        where = {"file": info.relative_path, "tensor": index.fqn}
        if getattr(info, "transform_descriptors", None):
            return _Look(None, has_checksum=False)  # its writer alone can undo what it did
        try:
            found = ZipSlice(lambda offset, length: self._read(info, offset, length), length=info.length)
            box = self._boxes.get(index)
            wrong = self._wrong_box(found, box) if box is not None else ""
            if wrong:
                return _Look(Problem(kind="wrong-dtype" if wrong.startswith("dtype") else "wrong-shape", detail=wrong, **where), False)
            has_checksum = any(record.crc32 for record in found.records.values())
            damaged = [name for name in found.records if not self._matches(found, name, info)] if has_checksum else []
        except (CheckpointError, OSError) as error:
            what = error.what if isinstance(error, CheckpointError) else str(error)
            return _Look(Problem(kind="unreadable", detail=f"at byte {info.offset}: {what}", **where), has_checksum=False)
        if damaged:
            what = "the values differ" if _PAYLOAD in damaged else f"{', '.join(damaged)} differ"
            return _Look(Problem(kind="wrong-checksum", detail=f"at byte {info.offset}: {what} from what was written", **where), True)
        return _Look(None, has_checksum)

    def _wrong_box(self, found: ZipSlice, box: tuple[torch.dtype, tuple[int, ...]]) -> str:
        """How the part is not what `.metadata` says, in words; nothing when it is."""
        dtype, sizes = box
        layout: Layout = read_layout(found.content("data.pkl"))
        if layout.dtype != dtype:
            return f"dtype {dtype_name(layout.dtype)} is stored, .metadata says {dtype_name(dtype)}"
        if layout.shape != sizes:
            return f"shape {layout.shape} is stored, .metadata says {sizes}"
        payload = found.record(_PAYLOAD).num_bytes if layout.num_elements else 0
        return f"size {payload} bytes are stored, {layout.num_bytes} belong to it" if payload != layout.num_bytes else ""

    def _matches(self, found: ZipSlice, name: str, info: _StorageInfo) -> bool:
        """Whether the bytes of a record have the checksum that the zip holds; in pieces."""
        record = found.record(name)
        start = found.offset(record)
        crc = 0
        for done in range(0, record.num_bytes, CHUNK_BYTES):
            crc = zlib.crc32(self._read(info, start + done, min(CHUNK_BYTES, record.num_bytes - done)), crc)
        return crc == record.crc32

    def _read(self, info: _StorageInfo, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > info.length:
            raise Corrupt("its zip reaches outside of the part")
        raw = bytearray(length)
        self._folder.read_into(self._files[info.relative_path], offset=info.offset + offset, buffer=memoryview(raw))
        return bytes(raw)
