"""From the hashes of documents: which are copies, which are held out, and which several sources share. Arrays alone, no text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
_ROWS_AT_ONCE = 1 << 20


def first_ones(digests: npt.NDArray[np.uint8]) -> Bools:
    """Of `digests` (N, 32): whether a document is the first of its text. Told apart by 16 bytes; takes about 40 bytes a document."""
    high, low = word_of(digests, 0), word_of(digests, 1)
    order = np.lexsort((low, high))
    repeats = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    is_first = np.ones(len(digests), dtype=np.bool_)
    is_first[order[1:][repeats]] = False
    return is_first


def heldout_limit(digests: npt.NDArray[np.uint8], *, kept: Bools, fraction: float) -> int:
    """The number below which the sha256 of a held-out document lies: some are held out and some are not, where that can be."""
    limit = int(fraction * 2**64) << 192
    num_kept, num_below = int(kept.sum()), int((below(digests, limit) & kept).sum())
    if fraction == 0 or num_kept == 1:
        return 0
    if num_below == 0:
        return _extreme(digests, kept=kept, largest=False) + 1
    if num_below == num_kept:
        return _extreme(digests, kept=kept, largest=True)
    return limit


def below(digests: npt.NDArray[np.uint8], limit: int) -> Bools:
    """Which digests, as numbers, are less than `limit`."""
    bound = np.frombuffer(limit.to_bytes(33, "big")[1:], dtype=">u8").astype(np.uint64)
    is_less = np.zeros(len(digests), dtype=np.bool_)
    is_equal = np.ones(len(digests), dtype=np.bool_)
    for place in range(4):
        word = word_of(digests, place)
        is_less |= is_equal & (word < bound[place])
        is_equal &= word == bound[place]
    return is_less


def shared_counts(sources: Mapping[str, npt.NDArray[np.uint8]]) -> dict[str, int]:
    """How many of the distinct documents of each source are in another source too."""
    if len(sources) < 2:
        return dict.fromkeys(sources, 0)
    high = np.concatenate([word_of(digests, 0) for digests in sources.values()])
    low = np.concatenate([word_of(digests, 1) for digests in sources.values()])
    number = np.repeat(np.arange(len(sources)), [len(digests) for digests in sources.values()])
    order = np.lexsort((low, high))
    repeats = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    in_several = np.zeros(len(order), dtype=np.bool_)
    in_several[order[1:][repeats]] = True
    in_several[order[:-1][repeats]] = True
    counts = np.bincount(number[in_several], minlength=len(sources))
    return {name: int(count) for name, count in zip(sources, counts, strict=True)}


def word_of(digests: npt.NDArray[np.uint8], place: int) -> Words:
    """Bytes [8 place, 8 place + 8) of each digest as a big-endian number."""
    words = np.empty(len(digests), dtype=np.uint64)
    for first, block in _blocks(digests):
        words[first : first + len(block)] = np.ascontiguousarray(block[:, 8 * place : 8 * place + 8]).view(">u8").reshape(-1)
    return words


def _blocks(rows: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    return ((first, rows[first : first + _ROWS_AT_ONCE]) for first in range(0, len(rows), _ROWS_AT_ONCE))


def _extreme(digests: npt.NDArray[np.uint8], *, kept: Bools, largest: bool) -> int:
    first = word_of(digests, 0)
    edge = first[kept].max() if largest else first[kept].min()
    candidates = [int.from_bytes(digest.tobytes(), "big") for digest in digests[kept & (first == edge)]]
    return max(candidates) if largest else min(candidates)
