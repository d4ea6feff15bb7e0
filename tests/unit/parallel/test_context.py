"""Which positions a context rank has: every one once, the same work for all, labels and documents with their tokens."""

from __future__ import annotations

import pytest
import torch

from surefoot.core.errors import ConfigError
from surefoot.model.attention import DocumentMask
from surefoot.parallel.context import SequencePart
from surefoot.tensors.batch import IGNORED_LABEL, Batch

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_position_is_on_one_rank_and_they_are_gathered_rank_after_rank(size: int) -> None:
    part = SequencePart(size=size)
    parts = [part.index(24, rank=rank, device=CPU) for rank in range(size)]
    assert torch.equal(torch.cat(parts), part.order(24, device=CPU))
    assert torch.cat(parts).sort().values.tolist() == list(range(24))
    assert all(index_S.tolist() == sorted(index_S.tolist()) for index_S in parts)


@pytest.mark.parametrize("window", [0, 1, 4, 9, 24])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_meets_as_many_keys(size: int, window: int) -> None:
    """Up to the start of the sequence, where a window is not full yet: that is on one rank."""
    one_document_BT, index_T = torch.zeros((1, 24), dtype=torch.int64), torch.arange(24)
    part, mask = SequencePart(size=size), DocumentMask(window=window)
    pairs = []
    for rank in range(size):
        index_S = part.index(24, rank=rank, device=CPU)
        pairs.append(int(mask(one_document_BT[:, index_S], index_S, (one_document_BT, index_T)).sum()))
    missing_at_start = window * (window - 1) // 2 if window else 0
    assert max(pairs) - min(pairs) <= missing_at_start
    if window in (0, 24):
        assert len(set(pairs)) == 1


def test_a_rank_gets_the_labels_and_documents_of_its_tokens_and_counts_its_own() -> None:
    tokens_BT = torch.arange(16).reshape(2, 8)
    labels_BT = torch.where(tokens_BT % 3 == 0, IGNORED_LABEL, tokens_BT + 1)
    atom = Batch(
        tokens_BT, labels_BT, tokens_BT + 100, tokens_BT // 3, torch.tensor([7, 8]), int((labels_BT != IGNORED_LABEL).sum()), atom=5
    )
    parts = [SequencePart(rank, 2).of(atom) for rank in range(2)]
    assert parts[0].tokens_BS.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert parts[1].tokens_BS.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    for part in parts:
        assert torch.equal(part.labels_BS, torch.where(part.tokens_BS % 3 == 0, IGNORED_LABEL, part.tokens_BS + 1))
        assert torch.equal(part.positions_BS, part.tokens_BS + 100)
        assert torch.equal(part.doc_ids_BS, part.tokens_BS // 3)
        assert (part.atom, part.sample_ids_B.tolist()) == (5, [7, 8])
    assert sum(part.num_live_tokens for part in parts) == atom.num_live_tokens
    assert SequencePart().of(atom) is atom


def test_a_sequence_without_equal_pieces_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 positions cannot be cut into 4 equal pieces"):
        SequencePart(size=2).index(6, rank=0, device=CPU)
