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
    checksum_file,
    read_manifest,
    rng_key,
)
from surefoot.checkpoint.metadata import check_metadata, chunk_index, parse_metadata, read_chunk, stored_in, tensor_metadata
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import CheckpointError, Corrupt, Incompatible, Incomplete
from surefoot.core.records import Manifest, ManifestFile, ManifestTensor, Problem
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
    """Whether the bytes are those that were written."""
    try:
        found = checksum_file(path / file.name)
    except OSError as error:
        return Problem(kind="unreadable", file=file.name, detail=str(error))
    if found != file.xxh3_128:
        return Problem(kind="wrong-checksum", file=file.name, detail=f"xxh3_128 {found}, written {file.xxh3_128}")
    return None


def check_tensors(path: Path, metadata: Metadata, tensors: Iterable[ManifestTensor]) -> list[Problem]:
    """Read each tensor back part by part and compare its digest."""
    return [problem for tensor in tensors if (problem := _check_tensor(path, metadata, tensor))]


def read_metadata(path: Path) -> Metadata:
    file = path / METADATA_NAME
    return parse_metadata(file.read_bytes(), where=str(file))


def verified_metadata(path: Path, manifest: Manifest) -> Metadata:
    """`.metadata` whose bytes match the manifest, and which describes exactly its tensors. Raises CheckpointError."""
    raw = verified_bytes(path, manifest, METADATA_NAME)
    metadata = parse_metadata(raw, where=str(path / METADATA_NAME))
    raise_first(check_metadata(metadata, tensors=manifest.tensors, files=manifest.files), where=path)
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
    extras = loads(verified_bytes(path, manifest, EXTRAS_NAME))
    if not isinstance(extras, dict):
        raise Corrupt("no JSON object", where=str(path / EXTRAS_NAME))
    return extras


def _check_tensor(path: Path, metadata: Metadata, tensor: ManifestTensor) -> Problem | None:
    entry = tensor_metadata(metadata, tensor.key)
    parts = []
    files = ",".join(sorted(stored_in(metadata, tensor.key)))
    for chunk in entry.chunks:
        info = metadata.storage_data[chunk_index(tensor.key, chunk)]
        try:
            local = read_chunk(path, info)
        except Corrupt as error:
            return Problem(kind="unreadable", file=info.relative_path, tensor=tensor.key, detail=error.what)
        if dtype_name(local.dtype) != tensor.dtype or local.shape != chunk.sizes:
            detail = f"stored part is {dtype_name(local.dtype)} {tuple(local.shape)}, expected {tensor.dtype} {tuple(chunk.sizes)}"
            return Problem(kind="wrong-shape", file=info.relative_path, tensor=tensor.key, detail=detail)
        parts.append(box_digest(local, global_shape=entry.size, offsets=chunk.offsets))
    found = as_hex(combine(parts))
    if found != tensor.digest:
        return Problem(kind="wrong-digest", file=files, tensor=tensor.key, detail=f"digest {found}, in the run {tensor.digest}")
    return None
