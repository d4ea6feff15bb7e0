"""Signatures: the same whatever stands beside a document, and as near to the true similarity as 32 bins can be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from surefoot.data.quality.minhash import NUM_BINS, jaccard, signatures, similarity


def document(num_tokens: int, *, seed: int) -> npt.NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(1, 8192, size=num_tokens).astype(np.uint16)


def edited(tokens: npt.NDArray[np.uint16], *, share: float, seed: int) -> npt.NDArray[np.uint16]:
    draw = np.random.default_rng(seed)
    return np.where(draw.random(tokens.size) < share, draw.integers(1, 8192, size=tokens.size), tokens).astype(np.uint16)


def test_a_signature_hangs_on_its_document_alone() -> None:
    documents = [document(length, seed=length) for length in (1, 3, 5, 6, 40, 700, 300_000, 12)]
    together = signatures(documents)
    assert together.shape == (len(documents), NUM_BINS)
    for number, tokens in enumerate(documents):
        assert (signatures([tokens])[0] == together[number]).all()
        assert (signatures([tokens.astype(np.uint32)])[0] == together[number]).all()
    assert signatures([]).shape == (0, NUM_BINS)


@pytest.mark.parametrize(("num_tokens", "share"), [(12, 0.05), (60, 0.02), (400, 0.02), (400, 0.1), (3000, 0.01), (3000, 0.15)])
def test_the_estimate_is_that_of_the_exact_similarity(num_tokens: int, share: float) -> None:
    errors, spread = [], []
    for seed in range(48):
        one = document(num_tokens, seed=seed)
        other = edited(one, share=share, seed=seed + 1000)
        exact = jaccard(one, other)
        pair = signatures([one, other])
        errors.append(similarity(pair[0], pair[1:])[0] - exact)
        spread.append(exact * (1.0 - exact) / NUM_BINS)
    expected = np.sqrt(np.mean(spread))
    assert abs(np.mean(errors)) < 4.0 * expected / np.sqrt(len(errors)) + 1e-9
    assert np.std(errors) < 1.6 * expected + 1e-9


def test_what_has_nothing_in_common_is_not_alike() -> None:
    table = signatures([document(500, seed=seed) for seed in range(60)])
    assert similarity(table[0], table[1:]).max() < 0.1
    assert similarity(table[0], table[:1])[0] == 1.0
    assert jaccard(document(500, seed=1), document(500, seed=2)) == 0.0
    assert jaccard(document(500, seed=1), document(500, seed=1)) == 1.0
