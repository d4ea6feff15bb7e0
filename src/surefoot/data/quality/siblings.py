"""Documents like a given one, found by their signatures: all shards of all sources are gone through, a piece at a time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError
from surefoot.data.manifest import ShardEntry
from surefoot.data.provenance import StoredDocument
from surefoot.data.quality.minhash import NUM_BINS, Signatures, signatures, similarity
from surefoot.data.quality.stored import Shelf

MIN_SIMILARITY: Final = 0.3
"""Chance gives 1 in 65,536 for each bin; 10 equal ones of 32 are no chance among 1e12 documents."""
_ROWS_READ: Final = 1 << 15  # 2 MiB of signatures
_DOCS_COMPUTED: Final = 256


@dataclass(frozen=True, slots=True)
class Sibling:
    """A document, and its estimated similarity to the nearest of the given ones."""

    document: StoredDocument
    similarity: float


def siblings(
    shelf: Shelf, wanted: Signatures, *, min_similarity: float = MIN_SIMILARITY, limit: int = 100, without: Sequence[str] = ()
) -> list[Sibling]:
    """The `limit` documents nearest to any of the signatures `wanted` (n, 32), nearest first; those with a hash in `without` left out.

    Reads 64 bytes a document from the `.sig` files. Where a shard has none, its signatures are computed from its tokens.
    """
    best: list[tuple[float, int, str, int]] = []  # a heap: the worst of the best first
    for source in shelf.manifest.sources:
        for first, table in stored_signatures(shelf, source):
            nearest = np.zeros(len(table))
            for one in wanted:
                np.maximum(nearest, similarity(one, table), out=nearest)
            for row in np.flatnonzero(nearest >= min_similarity).tolist():
                heapq.heappush(best, (float(nearest[row]), -(first + row), source, first + row))
                if len(best) > limit + len(without):
                    heapq.heappop(best)
    found = [Sibling(shelf.document(source, number), score) for score, _, source, number in sorted(best, reverse=True)]
    return [sibling for sibling in found if sibling.document.hash not in without][:limit]


def stored_signatures(shelf: Shelf, source: str) -> Iterator[tuple[int, Signatures]]:
    """(number of the first document, signatures) over all documents of `source`, some thousand at a time."""
    first_doc = 0
    for shard in shelf.manifest.split(source, shelf.split).shards:
        path = shelf.path / source / shelf.split / f"{shard.name}.sig"
        pieces = _read(path, shard=shard) if path.exists() else _computed(shelf, source, first_doc=first_doc, num_docs=shard.docs)
        for first, table in pieces:
            yield first_doc + first, table
        first_doc += shard.docs


def have_signatures(shelf: Shelf) -> bool:
    """Whether every shard has them stored; else they are computed, which reads all tokens."""
    return all(
        (shelf.path / source / shelf.split / f"{shard.name}.sig").exists()
        for source in shelf.manifest.sources
        for shard in shelf.manifest.split(source, shelf.split).shards
    )


def _read(path: Path, *, shard: ShardEntry) -> Iterator[tuple[int, Signatures]]:
    num_bytes = path.stat().st_size
    if num_bytes != shard.docs * NUM_BINS * 2:
        what = f"{num_bytes} bytes of signatures, wanted {shard.docs * NUM_BINS * 2} for {shard.docs} documents"
        raise DataError(what, where=str(path), hint="restore the file, or prepare the data again with --force", got=num_bytes)
    with path.open("rb") as file:
        for first in range(0, shard.docs, _ROWS_READ):
            rows = min(_ROWS_READ, shard.docs - first)
            table: npt.NDArray[np.uint16] = np.frombuffer(file.read(rows * NUM_BINS * 2), dtype="<u2").reshape(rows, NUM_BINS)
            yield first, table


def _computed(shelf: Shelf, source: str, *, first_doc: int, num_docs: int) -> Iterator[tuple[int, Signatures]]:
    for first in range(0, num_docs, _DOCS_COMPUTED):
        numbers = range(first_doc + first, first_doc + min(num_docs, first + _DOCS_COMPUTED))
        yield first, signatures([shelf.tokens(shelf.document(source, number).span) for number in numbers])
