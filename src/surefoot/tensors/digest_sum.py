"""What is done with "sf1" digests once they are taken: adding boxes up, writing them down. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from surefoot.core.hashing import sha256_json

ALGORITHM = "sf1"
_MASK = (1 << 64) - 1


class DigestedTensor(Protocol):
    """What `state_digest` needs of a manifest's tensor."""

    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def digest(self) -> str: ...


def combine(digests: Iterable[int]) -> int:
    """Digest of the union of disjoint boxes."""
    return sum(digests) & _MASK


def as_hex(digest: int) -> str:
    """The form that manifests hold: 16 hex digits."""
    return f"{digest & _MASK:016x}"


def state_digest(items: Iterable[DigestedTensor]) -> str:
    """ "sf1:<sha256>" over the canonical JSON of [key, dtype, shape, digest] sorted by key. The caller picks the items."""
    rows = sorted([item.key, item.dtype, list(item.shape), item.digest] for item in items)
    return f"{ALGORITHM}:{sha256_json(rows)}"
