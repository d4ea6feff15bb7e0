"""Content identity: sha256 over canonical JSON, and keyed 64-bit integers for arithmetic that must never change."""

from __future__ import annotations

import hashlib
from pathlib import Path

from surefoot.core.strict_json import canonical

ZERO_HASH = "0" * 64


def sha256_json(value: object) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def sha256_file(path: Path, *, chunk_bytes: int = 1 << 20) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            digest.update(chunk)
    return digest.hexdigest()


def key64(*parts: object) -> int:
    """A 64-bit key from (seed, name, epoch, ...): BLAKE2b over canonical JSON, so no sum of parts can collide with another."""
    return int.from_bytes(hashlib.blake2b(canonical(list(parts)), digest_size=8).digest(), "little")
