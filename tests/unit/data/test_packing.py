from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.packing import IGNORED_LABEL, join_rows, num_samples_in, pack_rows, phantom_rows
from surefoot.tensors import batch

EOS = 9


def test_a_row_by_hand() -> None:
    rows = pack_rows(np.array([[5, 6, 9, 7, 9, 9, 8, 4]], dtype=np.uint16), eos_id=EOS)
    assert rows.tokens_BS.tolist() == [[5, 6, 9, 7, 9, 9, 8]]
    assert rows.labels_BS.tolist() == [[6, 9, -100, 9, -100, -100, 4]]
    assert rows.doc_ids_BS.tolist() == [[0, 0, 0, 1, 1, 2, 3]]
    assert rows.positions_BS.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert {part.dtype for part in rows} == {np.dtype(np.int64)}


@given(st.lists(st.lists(st.integers(5, EOS), min_size=9, max_size=9), min_size=1, max_size=5))
def test_all_rows_at_once_equal_one_by_one(stream: list[list[int]]) -> None:
    rows = pack_rows(np.array(stream, dtype=np.uint16), eos_id=EOS)
    for number, tokens in enumerate(stream):
        document, position = 0, 0
        for place in range(8):
            assert rows.tokens_BS[number, place] == tokens[place]
            assert rows.doc_ids_BS[number, place] == document
            assert rows.positions_BS[number, place] == position
            ends = tokens[place] == EOS
            assert rows.labels_BS[number, place] == (IGNORED_LABEL if ends else tokens[place + 1])
            document, position = (document + 1, 0) if ends else (document, position + 1)


@pytest.mark.parametrize("is_blocked", [False, True])
def test_positions_with_a_label_are_counted(is_blocked: bool) -> None:
    rng = np.random.default_rng(0)
    for seq_len, lowest in ((1, 5), (7, 8), (300, 5), (300, -90)):
        stream_BT = rng.integers(lowest, EOS + 1, size=(4, seq_len + 1))
        blocked_BT = rng.random(stream_BT.shape) < 0.2 if is_blocked else None
        rows = pack_rows(stream_BT, eos_id=EOS, blocked_BT=blocked_BT)
        assert rows.num_live_B.tolist() == (rows.labels_BS != IGNORED_LABEL).sum(axis=1).tolist()
        (joined,) = join_rows(
            [rows._replace(**{name: part[:1] for name, part in rows._asdict().items()})], seq_len=seq_len + 3, eos_id=EOS
        ).num_live_B
        assert joined == rows.num_live_B[0]
    assert not phantom_rows(3, seq_len=4).num_live_B.any()


def test_phantoms_have_no_label() -> None:
    rows = phantom_rows(2, seq_len=4)
    assert (rows.labels_BS == IGNORED_LABEL).all()
    assert rows.positions_BS.tolist() == [[0, 1, 2, 3]] * 2
    assert not rows.tokens_BS.any()
    assert not rows.doc_ids_BS.any()


def test_samples_of_a_stream_need_one_token_more() -> None:
    assert [num_samples_in(tokens, seq_len=4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_the_constants_are_those_of_the_tensor_room() -> None:
    assert (IGNORED_LABEL, phantom_rows(1, seq_len=2).labels_BS[0, 0]) == (batch.IGNORED_LABEL, batch.IGNORED_LABEL)
