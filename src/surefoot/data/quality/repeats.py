"""What comes more than once in a source: documents that are nearly another, and n-grams of tokens that many documents share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.data.provenance import StoredDocument
from surefoot.data.quality.minhash import NUM_BINS, Signatures, signatures, token_grams
from surefoot.data.quality.siblings import have_signatures, stored_signatures
from surefoot.data.quality.stored import Shelf, excerpt, told

NEAR: Final = 0.8
"""From this similarity on a document is nearly a copy."""
_MAX_SIGNATURES: Final = 1 << 18  # 16 MiB
_MAX_COMPUTED_TOKENS: Final = 4_000_000
_BAND_BINS: Final = 4  # 8 bands of 4: of pairs at 0.8 one in 60 is missed, of pairs at 0.3 one in 16 is compared
_MAX_EXAMPLES: Final = 5
_GRAM_TOKENS: Final = 12
_NUM_PASSAGES: Final = 10
_LEAST_DOCUMENTS: Final = 3


@dataclass(frozen=True, slots=True)
class NearCopies:
    """Of `num_compared` documents of a source, `num_copies` are nearly another one of them."""

    num_compared: int
    num_copies: int
    examples: tuple[tuple[int, int, float], ...]

    def as_json(self, shelf: Shelf, source: str) -> dict[str, Any]:
        pairs = [
            {"similarity": score, "documents": [told(shelf.document(source, number)) for number in (one, other)]}
            for one, other, score in self.examples
        ]
        share = self.num_copies / self.num_compared if self.num_compared else 0.0
        return {"compared": self.num_compared, "copies": self.num_copies, "share": share, "similarity": NEAR, "examples": pairs}


def near_copies(shelf: Shelf, source: str) -> NearCopies:
    """By stored signatures of at most 262,144 documents; where there are none, of as many as 4 million tokens hold."""
    numbers, table = _signatures_of(shelf, source)
    return near_pairs(numbers, table)


def near_pairs(numbers: npt.NDArray[np.int64], table: Signatures) -> NearCopies:
    """Pairs that share a band of their signatures and are alike in the whole."""
    is_copy = np.zeros(len(table), dtype=bool)
    examples: dict[tuple[int, int], float] = {}
    for band in range(0, NUM_BINS, _BAND_BINS):
        keys = np.ascontiguousarray(table[:, band : band + _BAND_BINS]).view(np.uint64).reshape(-1)
        order = np.argsort(keys, kind="stable")
        first = np.flatnonzero(np.concatenate([[True], keys[order][1:] != keys[order][:-1]])) if len(order) else order
        leaders = np.repeat(order[first], np.diff(np.append(first, len(order)))) if len(order) else order
        pairs = np.flatnonzero(leaders != order)
        scores = (table[leaders[pairs]] == table[order[pairs]]).mean(axis=1)
        for place in np.flatnonzero(scores >= NEAR).tolist():
            one, other = sorted((int(leaders[pairs[place]]), int(order[pairs[place]])))
            is_copy[other] = True
            if len(examples) < _MAX_EXAMPLES:
                examples[int(numbers[one]), int(numbers[other])] = float(scores[place])
    listed = tuple((one, other, score) for (one, other), score in sorted(examples.items()))
    return NearCopies(len(table), int(is_copy.sum()), listed)


def shared_passages(shelf: Shelf, documents: Sequence[StoredDocument]) -> list[dict[str, Any]]:
    """What most of `documents` have in common, by 12-grams of tokens that stand in three or more; neighbours are one passage.

    Keeps 8 bytes for each n-gram, and goes through the documents twice.
    """
    grams = [np.unique(token_grams(shelf.beginning(document), n=_GRAM_TOKENS)) for document in documents]
    if not grams:
        return []
    found, counts = np.unique(np.concatenate(grams), return_counts=True)
    order = np.argsort(-counts, kind="stable")[: _NUM_PASSAGES * _GRAM_TOKENS]
    wanted = {int(found[index]): int(counts[index]) for index in order if counts[index] >= _LEAST_DOCUMENTS}
    return _passages(wanted, shelf, documents)


def _passages(wanted: dict[int, int], shelf: Shelf, documents: Sequence[StoredDocument]) -> list[dict[str, Any]]:
    """The text of each of `wanted`, where it first stands."""
    passages: list[dict[str, Any]] = []
    left = dict(wanted)
    for document in documents:
        if not left:
            break
        tokens = shelf.beginning(document)
        hashes = token_grams(tokens, n=_GRAM_TOKENS)
        places = np.flatnonzero(np.isin(hashes, np.fromiter(left, dtype=np.uint64)))
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places.size else ():
            counts = [count for place in run.tolist() if (count := left.pop(int(hashes[place]), None)) is not None]
            if counts:
                text = shelf.tokenizer.decode(tokens[int(run[0]) : int(run[-1]) + _GRAM_TOKENS].tolist())
                passages.append({"documents": max(counts), "tokens": int(run[-1] - run[0]) + _GRAM_TOKENS, "text": excerpt(text)})
    return sorted(passages, key=lambda passage: -passage["documents"])[:_NUM_PASSAGES]


def _signatures_of(shelf: Shelf, source: str) -> tuple[npt.NDArray[np.int64], Signatures]:
    split = shelf.manifest.split(source, shelf.split)
    if have_signatures(shelf):
        return _stored(shelf, source, every=max(1, -(-split.docs // _MAX_SIGNATURES)))
    limit = max(1, _MAX_COMPUTED_TOKENS * split.docs // max(1, split.tokens))
    numbers, tables = [], []
    for document in shelf.some(source, limit=limit, key=f"copies/{source}"):
        numbers.append(document.number)
        tables.append(signatures([shelf.tokens(document.span)]))
    table = np.concatenate(tables) if tables else np.empty((0, NUM_BINS), dtype=np.uint16)
    return np.array(numbers, dtype=np.int64), table


def _stored(shelf: Shelf, source: str, *, every: int) -> tuple[npt.NDArray[np.int64], Signatures]:
    numbers, tables = [np.empty(0, dtype=np.int64)], [np.empty((0, NUM_BINS), dtype=np.uint16)]
    for first, table in stored_signatures(shelf, source, every=every):
        numbers.append(first + np.arange(len(table), dtype=np.int64))
        tables.append(table)
    return np.concatenate(numbers), np.concatenate(tables)
