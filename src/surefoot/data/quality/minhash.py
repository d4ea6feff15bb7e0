"""How alike two documents are, from 64 bytes of each: one-permutation MinHash over 5-grams of tokens, with every empty bin filled.

A hash of each 5-gram falls into one of 32 bins, which keeps 16 bits of the smallest (Li, Owen and Zhang 2012). A bin without a 5-gram takes
over a fixed other one that has some (densification, Shrivastava 2017). The share of equal bins estimates the Jaccard similarity of the two
sets of 5-grams J, with a standard deviation near sqrt(J (1 - J) / 32): 0.09 at a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NUM_BINS: Final = 32
GRAM_TOKENS: Final = 5
_BIN_BITS: Final = np.uint64(5)
_BATCH_TOKENS: Final = 1 << 18  # bounds the memory of a call: about 10 arrays of 8 bytes a token
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK64: Final = (1 << 64) - 1

Signatures = npt.NDArray[np.uint16]
Tokens = npt.NDArray[Any]


def signatures(documents: Sequence[Tokens]) -> Signatures:
    """The signature of each document, [documents, 32]. A document is its token ids as they are stored, EOS at the end included.

    One of fewer than 5 tokens is one n-gram, filled up with zeros. The same tokens give the same signature whatever stands beside them.
    """
    out = np.empty((len(documents), NUM_BINS), dtype=np.uint16)
    first, num_tokens = 0, 0
    for end, document in enumerate(documents, start=1):
        num_tokens += max(GRAM_TOKENS, len(document))
        if num_tokens >= _BATCH_TOKENS or end == len(documents):
            out[first:end] = _signatures(documents[first:end])
            first, num_tokens = end, 0
    return out


def similarity(one: Signatures, others: Signatures) -> npt.NDArray[np.float64]:
    """Estimated Jaccard similarity of the signature `one` (32,) to each of `others` (n, 32)."""
    equal: npt.NDArray[np.float64] = (others == one).mean(axis=-1)
    return equal


def jaccard(one: Tokens, other: Tokens) -> float:
    """What `similarity` estimates: shared 5-grams over all 5-grams, as sets."""
    left, right = (np.unique(_gram_hashes(_padded(tokens))) for tokens in (one, other))
    shared = np.intersect1d(left, right, assume_unique=True).size
    return shared / (left.size + right.size - shared)


def token_grams(tokens: Tokens, *, n: int) -> npt.NDArray[np.uint64]:
    """A hash of each n-gram, at the place of its first token; empty where there are fewer tokens."""
    wide = np.asarray(tokens).astype(np.uint64)
    return _gram_hashes(wide, n=n) if wide.size >= n else np.empty(0, dtype=np.uint64)


def _signatures(documents: Sequence[Tokens]) -> Signatures:
    padded = [_padded(document) for document in documents]
    lengths = np.array([len(document) for document in padded], dtype=np.int64)
    hashes = _gram_hashes(np.concatenate(padded))
    ends = np.cumsum(lengths)
    number = np.repeat(np.arange(len(padded), dtype=np.int64), lengths)[: hashes.size]
    inside = np.arange(hashes.size) + GRAM_TOKENS <= ends[number]
    hashes, number = hashes[inside], number[inside].astype(np.uint64)
    # One sort finds every minimum: by (document, bin), then by the upper bits of the hash. The bin is taken of its lower ones.
    bins = (number << _BIN_BITS) | (hashes & np.uint64(NUM_BINS - 1))
    keys = np.sort(np.bitwise_or(np.left_shift(bins, np.uint64(32)), np.right_shift(hashes, np.uint64(32))).astype(np.uint64))
    of_bin = keys >> np.uint64(32)
    firsts = np.flatnonzero(np.concatenate([[True], of_bin[1:] != of_bin[:-1]]))
    table = np.zeros(len(padded) * NUM_BINS, dtype=np.uint16)
    is_filled = np.zeros(len(padded) * NUM_BINS, dtype=bool)
    at = of_bin[firsts].astype(np.int64)
    table[at] = _mix(keys[firsts] & np.uint64(0xFFFFFFFF)).astype(np.uint16)  # a minimum's own upper bits are mostly zeros
    is_filled[at] = True
    return _densified(table.reshape(-1, NUM_BINS), is_filled=is_filled.reshape(-1, NUM_BINS))


def _densified(table: Signatures, *, is_filled: npt.NDArray[np.bool_]) -> Signatures:
    """Each empty bin as the first filled one in an order of its own, the same for all documents."""
    short = np.flatnonzero(~is_filled.all(axis=1))
    donors = _donors()
    choice = is_filled[short][:, donors].argmax(axis=2)  # (documents, bins): place in the order; a filled bin comes first in its own
    table[short] = np.take_along_axis(table[short], donors[np.arange(NUM_BINS), choice], axis=1)
    return table


@lru_cache(maxsize=1)
def _donors() -> npt.NDArray[np.int64]:
    """(32, 32): the order in which a bin asks the others, itself first; by hashes, so that no two bins walk together."""
    pairs = np.arange(NUM_BINS * NUM_BINS, dtype=np.uint64).reshape(NUM_BINS, NUM_BINS)
    order = _mix(pairs + np.uint64(0xD1B54A32D192ED03))
    np.fill_diagonal(order, 0)
    return np.argsort(order, axis=1, kind="stable")


def _padded(tokens: Tokens) -> npt.NDArray[np.uint64]:
    wide = np.asarray(tokens).astype(np.uint64)
    return wide if wide.size >= GRAM_TOKENS else np.concatenate([wide, np.zeros(GRAM_TOKENS - wide.size, dtype=np.uint64)])


def _gram_hashes(tokens: npt.NDArray[np.uint64], *, n: int = GRAM_TOKENS) -> npt.NDArray[np.uint64]:
    num_grams = tokens.size - n + 1
    hashes = np.zeros(num_grams, dtype=np.uint64)
    for offset in range(n):
        seed = (offset + 1) * _GOLDEN & _MASK64 | 1
        hashes += (tokens[offset : offset + num_grams] + np.uint64(1)) * np.uint64(seed)
    return _mix(hashes)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
