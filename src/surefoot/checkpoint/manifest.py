"""The commit record on disk: canonical JSON that carries its own sha256, and the names of what lies beside it. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import xxhash

from surefoot.core.errors import Corrupt, Incompatible, Incomplete
from surefoot.core.hashing import sha256_json
from surefoot.core.records import Manifest, ManifestFile, ManifestTensor
from surefoot.core.strict_json import canonical, loads, plain

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""1 does not say who wrote a file."""
MANIFEST_NAME = "manifest.json"
EXTRAS_NAME = "extras.json"
METADATA_NAME = ".metadata"
RNG_PREFIX = "rng/rank_"
DIGESTED_PREFIXES = ("model.", "optim.")
"""The keys that `state_digest` covers."""

_ID = re.compile(r"s([0-9]{1,18})-a([0-9]{1,18})(?:-r([0-9]{1,18}))?")


def checkpoint_id(step: int, *, attempt: int, retry: int = 0) -> str:
    """`s<step>-a<attempt>[-r<retry>]`."""
    return f"s{step}-a{attempt}" + (f"-r{retry}" if retry else "")


def parse_id(name: str) -> tuple[int, int, int] | None:
    """(step, attempt, retry) of a checkpoint id, None for any other name."""
    match = _ID.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def rng_key(rank: int) -> str:
    return f"{RNG_PREFIX}{rank:05d}"


def sealed(manifest: Manifest) -> Manifest:
    """`manifest` with the hash over all its other fields."""
    return replace(manifest, hash=sha256_json(_unhashed(plain(asdict(manifest)))))


def manifest_bytes(manifest: Manifest) -> bytes:
    """What `manifest.json` holds."""
    return canonical(asdict(manifest))


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint folder `path`, its own hash verified. Raises Incomplete, Corrupt or Incompatible."""
    file = path / MANIFEST_NAME
    try:
        if not file.is_file():  # a pipe would keep its reader waiting
            raise FileNotFoundError(file)
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Incomplete(
            f"no {MANIFEST_NAME}: this is not a finished checkpoint", where=str(path), hint="choose another one, see checkpoint list"
        ) from error
    return parse_manifest(raw, where=str(file))


def parse_manifest(raw: bytes, *, where: str) -> Manifest:
    """A Manifest from its exact bytes: any other spelling of the same values is refused too, so no flipped bit goes unseen."""
    hint = "restore another checkpoint, or this one from another copy"
    try:
        found = loads(raw)
    except ValueError as error:
        raise Corrupt(f"not valid JSON: {error}", where=where, hint=hint) from error
    if not isinstance(found, dict) or canonical(found) != raw or found.get("hash") != sha256_json(_unhashed(found)):
        raise Corrupt("the content does not match its own hash", where=where, hint=hint)
    if (version := found.get("format_version")) not in READABLE_VERSIONS:
        raise Incompatible(f"format version {version}, this surefoot reads {' and '.join(map(str, READABLE_VERSIONS))}", where=where)
    try:
        manifest = manifest_from_json(found)
        _check_types(manifest)
    except (KeyError, TypeError) as error:
        raise Incompatible(f"a field is missing or of the wrong type: {error!r}", where=where) from error
    _refuse_odd_names(manifest, where=where, hint=hint)
    return manifest


def manifest_from_json(value: Mapping[str, Any]) -> Manifest:
    """A Manifest from JSON types. Fields that a newer surefoot added are left out."""
    known = {field.name: value[field.name] for field in fields(Manifest)}
    known["files"] = tuple(ManifestFile(**file) for file in value["files"])
    known["tensors"] = tuple(ManifestTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in value["tensors"])
    return Manifest(**known)


def _check_types(manifest: Manifest) -> None:
    """Raises TypeError. The hash is no signature: anybody can make one over any values."""
    texts = [manifest.id, manifest.run, manifest.state_digest, manifest.data_hash, manifest.ledger_hash, manifest.parent or ""]
    counts = [manifest.step, manifest.attempt, manifest.generation, manifest.tokens, manifest.ledger_seq, *manifest.topology.values()]
    for file in manifest.files:
        texts += (file.name, file.xxh3_128, file.host)
        counts += (file.num_bytes, file.rank + 1)  # -1 is nobody
    for tensor in manifest.tensors:
        texts += (tensor.key, tensor.dtype, tensor.digest)
        counts += tensor.shape
    tables = (manifest.config_hashes, manifest.topology, manifest.environment, manifest.cursor)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(table, dict) for table in tables):
        raise TypeError("a text or a table is none")
    if any(type(count) is not int or count < 0 for count in counts):
        raise TypeError("a count is none")


def _refuse_odd_names(manifest: Manifest, *, where: str, hint: str) -> None:
    """Names become paths and keys of objects: none may lead out of its folder, or stand twice."""
    names = [file.name for file in manifest.files]
    odd = [name for name in names if name != Path(name).name or "\0" in name or name in ("", "..", MANIFEST_NAME)]
    if odd or parse_id(manifest.id) is None:
        raise Corrupt(f"no name of a checkpoint or of a file in it: {odd[0] if odd else manifest.id!r}", where=where, hint=hint)
    if len(set(names)) < len(names) or len({tensor.key for tensor in manifest.tensors}) < len(manifest.tensors):
        raise Corrupt("a name stands in it twice", where=where, hint=hint)


def checksum_bytes(data: bytes) -> str:
    return str(xxhash.xxh3_128(data).hexdigest())


def checksum_file(path: Path, *, chunk_bytes: int = 1 << 22) -> str:
    """xxh3_128 of a whole file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            digest.update(chunk)
    return str(digest.hexdigest())


def _unhashed(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key != "hash"}
