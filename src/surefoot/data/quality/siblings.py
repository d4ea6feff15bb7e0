"""Documents like a given one, found by their signatures: all shards of all sources are gone through, a piece at a time."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from surefoot.core.errors import DataError
from surefoot.data.manifest import ShardEntry
from surefoot.data.provenance import StoredDocument
from surefoot.data.quality.minhash import NUM_BINS, Signatures, signatures, similarity
from surefoot.data.quality.stored import Shelf

MIN_SIMILARITY: Final = 0.3
"""Chance gives 1 in 65,536 for each bin; 10 equal ones of 32 are no chance among 1e12 documents."""
LEAST_SIMILARITY: Final = 2 / NUM_BINS
"""What is as little alike may still be of the family, or share a heading: a person has to look."""
_ROWS_READ: Final = 1 << 13  # half a megabyte
_ROW_BYTES: Final = 2 * NUM_BINS
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


def stored_signatures(shelf: Shelf, source: str, *, every: int = 1) -> Iterator[tuple[int, Signatures]]:
    """(number of the first document, signatures) of pieces of some thousand documents of `source`: of all, or of one piece in `every`.

    What fills up a shard is the last of its numbers, and left out.
    """
    first_doc, piece = 0, 0
    for shard in shelf.manifest.split(source, shelf.split).shards:
        path = shelf.path / source / shelf.split / f"{shard.name}.sig"
        is_stored = path.exists()
        num_docs = shelf.whole_documents(source, shard)
        for first in range(0, num_docs, _ROWS_READ):
            if piece % every == 0:
                rows = min(_ROWS_READ, num_docs - first)
                read = _read(path, shard=shard, first=first, rows=rows) if is_stored else _computed(shelf, source, first_doc + first, rows)
                yield first_doc + first, read
            piece += 1
        first_doc += shard.docs


def have_signatures(shelf: Shelf) -> bool:
    """Whether every shard has them stored; else they are computed, which reads all tokens."""
    return all(
        (shelf.path / source / shelf.split / f"{shard.name}.sig").exists()
        for source in shelf.manifest.sources
        for shard in shelf.manifest.split(source, shelf.split).shards
    )


def _read(path: Path, *, shard: ShardEntry, first: int, rows: int) -> Signatures:
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != shard.docs * _ROW_BYTES:
            what = f"{num_bytes} bytes of signatures, wanted {shard.docs * _ROW_BYTES} for {shard.docs} documents"
            raise DataError(what, where=str(path), hint="restore the file, or prepare the data again with --force", got=num_bytes)
        file.seek(first * _ROW_BYTES)
        return np.frombuffer(file.read(rows * _ROW_BYTES), dtype="<u2").reshape(rows, NUM_BINS)


def _computed(shelf: Shelf, source: str, first: int, rows: int) -> Signatures:
    """From the tokens, some documents at a time."""
    tables = []
    for start in range(first, first + rows, _DOCS_COMPUTED):
        numbers = range(start, min(first + rows, start + _DOCS_COMPUTED))
        tables.append(signatures([shelf.tokens(shelf.document(source, number).span) for number in numbers]))
    return np.concatenate(tables)
