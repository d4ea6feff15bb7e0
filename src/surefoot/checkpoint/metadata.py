"""DCP's `.metadata`, read without executing a pickle, and checked against what the manifest says."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from surefoot.checkpoint.pickle_scan import refuse_greedy, told
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import Corrupt, Incompatible
from surefoot.core.records import ManifestFile, ManifestTensor, Problem

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {(f"{_DCP}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")}  # fmt: skip
_ALLOWED |= {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


_FOREIGN = _ALLOWED | {(f"{_DCP}.metadata", "BytesStorageMetadata")}
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PurePosixPath")}


class _DataOnlyUnpickler(pickle.Unpickler):
    """Knows the plain records of DCP's metadata and nothing that acts."""

    allowed = _ALLOWED

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in checkpoint metadata")
        return super().find_class(module_name, global_name)


class _ForeignUnpickler(_DataOnlyUnpickler):
    """Knows as well what stock DCP writes and we do not: pickled objects by name, and the path where it wrote."""

    allowed = _FOREIGN

    def find_class(self, module_name: str, global_name: str) -> Any:
        return PurePosixPath if (module_name, global_name) in _PATHS else super().find_class(module_name, global_name)


def parse_metadata(raw: bytes, *, where: str, foreign: bool = False) -> Metadata:
    """Metadata from the bytes of `.metadata`; `foreign`: as stock DCP writes it. Raises Corrupt; never runs code from them."""
    try:
        if foreign:  # ours has the checksum of the manifest, and may be large
            refuse_greedy(raw)
        metadata = (_ForeignUnpickler if foreign else _DataOnlyUnpickler)(io.BytesIO(raw)).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds {type(metadata).__name__}, not DCP metadata")
        _check_types(metadata)
    except Exception as error:  # the bytes are foreign: whatever they make the unpickler raise is the finding
        raise Corrupt(f"cannot be read: {told(error)}", where=where, hint="restore another checkpoint, or another copy") from error
    return metadata


def _check_types(metadata: Metadata) -> None:
    """An unpickler gives a record whatever fields the bytes say. Raises TypeError, ValueError or AttributeError for others than DCP's."""
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and isinstance(entry.properties.dtype, torch.dtype):
            boxes = [entry.size, *(box for chunk in entry.chunks for box in (chunk.offsets, chunk.sizes))]
            if not all(isinstance(box, tuple) and all(type(number) is int for number in box) for box in boxes):
                raise TypeError(f"{key!s:.80} has sizes that are no numbers")
        elif not isinstance(entry, BytesStorageMetadata):
            raise TypeError(f"{key!s:.80} is a {type(entry).__name__}")
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str) or not isinstance(info, _StorageInfo):
            raise TypeError("a stored part is not described as DCP does")
        if type(info.offset) is not int or type(info.length) is not int:
            raise TypeError(f"{index.fqn:.80} lies at no number")
        if PurePosixPath(info.relative_path).name != info.relative_path or info.relative_path == "..":
            raise ValueError(f"{index.fqn:.80} lies outside of the folder, in {info.relative_path:.80}")


def tensor_metadata(metadata: Metadata, key: str) -> TensorStorageMetadata:
    """The entry of a tensor. Raises Incompatible for pickled objects, which are never read."""
    entry = metadata.state_dict_metadata[key]
    if not isinstance(entry, TensorStorageMetadata):
        raise Incompatible("is a pickled object, not a tensor: not read", where=key)
    return entry


def chunk_index(key: str, chunk: ChunkStorageMetadata) -> MetadataIndex:
    return MetadataIndex(key, chunk.offsets)


def part_at(entry: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """The part of a tensor that a read asks for."""
    if index.index is not None and index.index < len(entry.chunks) and entry.chunks[index.index].offsets == index.offset:
        return entry.chunks[index.index]
    return next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)


def stored_in(metadata: Metadata, key: str) -> set[str]:
    """Names of the files that hold a part of the tensor."""
    return {info.relative_path for index, info in metadata.storage_data.items() if index.fqn == key}


def check_metadata(metadata: Metadata, *, tensors: Iterable[ManifestTensor], files: Iterable[ManifestFile]) -> list[Problem]:
    """Whether `.metadata` describes exactly the manifest's tensors, whole, inside the manifest's files."""
    expected = {tensor.key: tensor for tensor in tensors}
    sizes = {file.name: file.num_bytes for file in files}
    problems = [
        Problem(kind="missing-tensor", tensor=key, detail="in the manifest only") for key in expected.keys() - metadata.state_dict_metadata
    ]
    problems += [
        Problem(kind="extra-tensor", tensor=key, detail="in .metadata only") for key in metadata.state_dict_metadata.keys() - expected
    ]
    for key in expected.keys() & metadata.state_dict_metadata.keys():
        problems += _check_tensor(metadata, expected[key], sizes)
    return sorted(problems, key=lambda problem: (problem.tensor, problem.kind))


def find_holes(key: str, entry: TensorStorageMetadata, stored: Mapping[MetadataIndex, Any]) -> list[Problem]:
    """Regions of the tensor that no stored chunk covers. DCP would leave them as they were in memory, without a word."""
    holes = []
    volume = 0
    overlapping = _overlapping([chunk for chunk in entry.chunks if len(chunk.offsets) == len(chunk.sizes) == len(entry.size)])
    for chunk in entry.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        fits = len(offsets) == len(sizes) == len(entry.size)
        if chunk_index(key, chunk) not in stored:
            holes.append(Problem(kind="hole", tensor=key, detail=f"the part at {offsets} of {sizes} was never written"))
        elif not fits or any(o < 0 or s < 0 or o + s > g for o, s, g in zip(offsets, sizes, entry.size, strict=True)):
            holes.append(Problem(kind="hole", tensor=key, detail=f"the part at {offsets} of {sizes} lies outside"))
        elif offsets in overlapping:
            holes.append(Problem(kind="hole", tensor=key, detail=f"the part at {offsets} of {sizes} overlaps another"))
        else:
            volume += math.prod(sizes)
    if not holes and volume != math.prod(entry.size):
        holes.append(Problem(kind="hole", tensor=key, detail=f"{volume} of {math.prod(entry.size)} elements are stored"))
    return holes


def _overlapping(chunks: Sequence[ChunkStorageMetadata]) -> set[tuple[int, ...]]:
    """Offsets of chunks that share an element with another one. In the order of the first dim, a chunk meets only its neighbours."""
    found: set[tuple[int, ...]] = set()
    near: list[ChunkStorageMetadata] = []
    for chunk in sorted((chunk for chunk in chunks if math.prod(chunk.sizes)), key=lambda chunk: tuple(chunk.offsets)):
        near = [other for other in near if not chunk.offsets or other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        for other in near:
            pairs = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=False)
            if all(max(start, before) < min(start + size, before + more) for start, size, before, more in pairs):
                found |= {tuple(chunk.offsets), tuple(other.offsets)}
        near.append(chunk)
    return found


def _check_tensor(metadata: Metadata, expected: ManifestTensor, sizes: Mapping[str, int]) -> list[Problem]:
    key, entry = expected.key, metadata.state_dict_metadata[expected.key]
    if not isinstance(entry, TensorStorageMetadata):
        return [Problem(kind="unreadable", tensor=key, detail="a pickled object, not a tensor")]
    problems = []
    if dtype_name(entry.properties.dtype) != expected.dtype:
        problems.append(
            Problem(kind="wrong-dtype", tensor=key, detail=f".metadata says {entry.properties.dtype}, manifest {expected.dtype}")
        )
    if tuple(entry.size) != expected.shape:
        problems.append(Problem(kind="wrong-shape", tensor=key, detail=f".metadata says {tuple(entry.size)}, manifest {expected.shape}"))
    problems += find_holes(key, entry, metadata.storage_data)
    for chunk in entry.chunks:
        info = metadata.storage_data.get(chunk_index(key, chunk))
        if info is not None and not 0 <= info.offset <= info.offset + info.length <= sizes.get(info.relative_path, -1):
            problems.append(Problem(kind="hole", tensor=key, file=info.relative_path, detail="its bytes lie outside of the file"))
    return problems
