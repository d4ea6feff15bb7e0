"""What is wrong with a checkpoint folder, from the folder alone: a bare copy can be verified anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from surefoot.checkpoint.manifest import (
    DIGESTED_PREFIXES,
    EXTRAS_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    RNG_PREFIX,
    checksum_bytes,
    read_manifest,
    rng_key,
)
from surefoot.checkpoint.metadata import check_metadata, chunk_index, parse_metadata, stored_in, tensor_metadata
from surefoot.checkpoint.parts import PartReader
from surefoot.checkpoint.readback import check_file, check_listing
from surefoot.checkpoint.reader import listed
from surefoot.checkpoint.sources import FolderSource
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import CheckpointError, Corrupt, Incompatible, Incomplete
from surefoot.core.records import Manifest, ManifestTensor, Problem
from surefoot.core.strict_json import loads
from surefoot.tensors.digest import as_hex, box_digest, combine, state_digest

_INCOMPLETE = {"missing-file", "missing-tensor", "hole"}
_INCOMPATIBLE = {"extra-tensor", "wrong-dtype", "wrong-shape"}
_SHOWN = 5


def verify(path: Path) -> list[Problem]:
    """Local. Everything that is wrong with the checkpoint folder `path`; reads every byte, holds one stored part in memory at a time.

    An empty list means: each file is the one that was written, and each tensor read back has the bits that it had in the run.
    """
    try:
        manifest = read_manifest(path)
    except Incomplete as error:
        return [Problem(kind="missing-file", file=MANIFEST_NAME, detail=error.what)]
    except CheckpointError as error:
        return [Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=error.what)]
    problems = check_contents(manifest) + check_listing(path, manifest)
    unusable = {problem.file for problem in problems}
    present = [file for file in manifest.files if file.name not in unusable]
    problems += [problem for file in present if (problem := check_file(path, file))]
    if EXTRAS_NAME not in {problem.file for problem in problems}:
        try:
            extras_of(path, manifest)
        except CheckpointError as error:
            problems.append(Problem(kind="unreadable", file=EXTRAS_NAME, detail=error.what))
    if METADATA_NAME in {problem.file for problem in problems}:
        return problems  # without a trusted .metadata nobody can say where a tensor lies
    try:
        metadata = read_metadata(path)
    except CheckpointError as error:
        return [*problems, Problem(kind="unreadable", file=METADATA_NAME, detail=error.what)]
    structure = check_metadata(metadata, tensors=manifest.tensors, files=manifest.files)
    broken = {problem.tensor for problem in structure}
    intact = [tensor for tensor in manifest.tensors if tensor.key not in broken]
    return problems + structure + check_tensors(path, metadata, intact)


def check_contents(manifest: Manifest) -> list[Problem]:
    """Whether the manifest agrees with itself: state digest over its tensors, a random stream for each rank that saved."""
    problems = []
    digest = state_digest(tensor for tensor in manifest.tensors if tensor.key.startswith(DIGESTED_PREFIXES))
    if digest != manifest.state_digest:
        problems.append(
            Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=f"state_digest {manifest.state_digest}, its tensors give {digest}")
        )
    stored = {tensor.key for tensor in manifest.tensors if tensor.key.startswith(RNG_PREFIX)}
    expected = {rng_key(rank) for rank in range(manifest.topology.get("world_size", 0))}
    problems += [
        Problem(kind="missing-tensor", tensor=key, detail="the random state of this rank is gone") for key in sorted(expected - stored)
    ]
    problems += [Problem(kind="extra-tensor", tensor=key, detail="no rank of this number saved") for key in sorted(stored - expected)]
    names = {file.name for file in manifest.files}
    problems += [Problem(kind="bad-manifest", file=name, detail="not listed") for name in (METADATA_NAME, EXTRAS_NAME) if name not in names]
    return problems


def check_tensors(path: Path, metadata: Metadata, tensors: Iterable[ManifestTensor]) -> list[Problem]:
    """Read each tensor back part by part and compare its digest."""
    files = listed(path, metadata)
    with FolderSource(path) as folder:
        parts = PartReader(files, dict.fromkeys(files, folder))
        return [problem for tensor in tensors if (problem := _check_tensor(metadata, tensor, parts))]


def read_metadata(path: Path) -> Metadata:
    file = path / METADATA_NAME
    return parse_metadata(file.read_bytes(), where=str(file))


def verified_metadata(path: Path, manifest: Manifest) -> Metadata:
    """`.metadata` whose bytes match the manifest, and which describes exactly its tensors. Raises CheckpointError."""
    return checked_metadata(verified_bytes(path, manifest, METADATA_NAME), manifest, where=path)


def checked_metadata(raw: bytes, manifest: Manifest, *, where: Path) -> Metadata:
    """The bytes of `.metadata`, which must describe exactly the tensors of the manifest. Raises CheckpointError."""
    metadata = parse_metadata(raw, where=str(where / METADATA_NAME))
    raise_first(check_metadata(metadata, tensors=manifest.tensors, files=manifest.files), where=where)
    return metadata


def verified_bytes(path: Path, manifest: Manifest, name: str) -> bytes:
    """The content of a small file, checked and used from the same bytes."""
    expected = next((file for file in manifest.files if file.name == name), None)
    raw = (path / name).read_bytes()
    if expected is None or checksum_bytes(raw) != expected.xxh3_128:
        raise_first([Problem(kind="wrong-checksum", file=name, detail="its bytes are not those that were written")], where=path)
    return raw


def raise_first(problems: Sequence[Problem], *, where: Path) -> None:
    """Raise the error that the first problem stands for, with the others in its text; nothing when there is none."""
    if not problems:
        return
    first = problems[0]
    kind = Incomplete if first.kind in _INCOMPLETE else Incompatible if first.kind in _INCOMPATIBLE else Corrupt
    told = [" ".join(part for part in (p.kind, p.file, p.tensor, f"({p.detail})" if p.detail else "") if part) for p in problems[:_SHOWN]]
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise kind("; ".join(told) + more, where=str(where), file=first.file, tensor=first.tensor, kind=first.kind)


def extras_of(path: Path, manifest: Manifest) -> dict[str, object]:
    """The JSON state beside the tensors, verified. Raises Corrupt."""
    return parse_extras(verified_bytes(path, manifest, EXTRAS_NAME), where=path)


def parse_extras(raw: bytes, *, where: Path) -> dict[str, object]:
    """The JSON state beside the tensors. Raises Corrupt."""
    try:
        extras = loads(raw)
    except ValueError as error:
        raise Corrupt(f"not valid JSON: {error}", where=str(where / EXTRAS_NAME)) from error
    if not isinstance(extras, dict):
        raise Corrupt("no JSON object", where=str(where / EXTRAS_NAME))
    return extras


def _check_tensor(metadata: Metadata, tensor: ManifestTensor, parts: PartReader) -> Problem | None:
    entry = tensor_metadata(metadata, tensor.key)
    digests = []
    for chunk in entry.chunks:
        info = metadata.storage_data[chunk_index(tensor.key, chunk)]
        try:
            local = parts.read_whole(parts.part(info))
        except (CheckpointError, OSError) as error:
            detail = f"at byte {info.offset}: {error.what if isinstance(error, CheckpointError) else error}"
            return Problem(kind="unreadable", file=info.relative_path, tensor=tensor.key, detail=detail)
        if dtype_name(local.dtype) != tensor.dtype or local.shape != chunk.sizes:
            detail = f"stored part is {dtype_name(local.dtype)} {tuple(local.shape)}, expected {tensor.dtype} {tuple(chunk.sizes)}"
            return Problem(kind="wrong-shape", file=info.relative_path, tensor=tensor.key, detail=detail)
        digests.append(box_digest(local, global_shape=entry.size, offsets=chunk.offsets))
    found = as_hex(combine(digests))
    if found != tensor.digest:
        files = ",".join(sorted(stored_in(metadata, tensor.key)))
        return Problem(kind="wrong-digest", file=files, tensor=tensor.key, detail=f"digest {found}, in the run {tensor.digest}")
    return None
