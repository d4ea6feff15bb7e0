"""From a stream of tokens to training rows: labels, positions and document boundaries. NumPy only, all rows at once.

Dim letters: B samples, S positions of a sequence (seq_len).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

IGNORED_LABEL: Final = -100
PHANTOM_SAMPLE: Final = -1
_MANY_DOCUMENTS: Final = 16  # per row: from here on a pass over all positions is faster than one over each document

I64Array = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Packed samples, all int64. `doc_ids_BS` numbers the documents of each sample from 0; `positions_BS` restart in each of them.

    `num_live_B` are the positions of each sample that have a label.
    """

    tokens_BS: I64Array
    labels_BS: I64Array
    positions_BS: I64Array
    doc_ids_BS: I64Array
    num_live_B: I64Array


def num_samples_in(num_tokens: int, *, seq_len: int) -> int:
    """Samples of a stream: sample k is tokens [k*S, k*S + S + 1), so each has a label for its last position. The rest is left over."""
    return max(0, (num_tokens - 1) // seq_len)


def pack_rows(stream_BT: npt.NDArray[Any], *, eos_id: int, blocked_BT: npt.NDArray[np.bool_] | None = None) -> Rows:
    """Rows from `stream_BT`, shape (B, S + 1): the tokens of each sample and the one that follows.

    The position that holds an EOS has no label: what follows is another document, which nothing here foretells. A document that goes on
    from the sample before starts at position 0. A blocked token becomes an EOS, and nothing foretells it: what stands behind it is another
    document, so that no position attends to what was blocked.
    """
    if blocked_BT is not None:
        stream_BT = np.where(blocked_BT, stream_BT.dtype.type(eos_id), stream_BT)
    num_rows, seq_len = len(stream_BT), stream_BT.shape[1] - 1
    tokens_BS, labels_BS, positions_BS, doc_ids_BS = np.empty((4, num_rows, seq_len), dtype=np.int64)
    tokens_BS[:] = stream_BT[:, :-1]
    labels_BS[:] = stream_BT[:, 1:]
    is_eos_BS = stream_BT[:, :-1] == eos_id
    ends = np.flatnonzero(is_eos_BS)
    labels_BS.reshape(-1)[ends] = IGNORED_LABEL
    num_live_B = seq_len - np.bincount(ends // seq_len, minlength=num_rows)
    if blocked_BT is not None:
        labels_BS[blocked_BT[:, 1:]] = IGNORED_LABEL
        num_live_B = np.count_nonzero(labels_BS != IGNORED_LABEL, axis=1)
    doc_ids_BS[:] = 0
    _number_documents(is_eos_BS, ends, positions_BS, doc_ids_BS)
    return Rows(tokens_BS, labels_BS, positions_BS, doc_ids_BS, num_live_B)


def _number_documents(is_eos_BS: npt.NDArray[np.bool_], ends: I64Array, positions_BS: I64Array, doc_ids_BS: I64Array) -> None:
    """Fill in positions and documents, each row a document of its own; those that begin behind an EOS make it several.

    `ends` are the places of the EOS in all rows behind each other.
    """
    seq_len = positions_BS.shape[1]
    index_S = np.arange(seq_len, dtype=np.int64)
    positions_BS[:] = index_S
    if ends.size > _MANY_DOCUMENTS * len(is_eos_BS):
        np.cumsum(is_eos_BS[:, :-1], axis=1, dtype=np.int64, out=doc_ids_BS[:, 1:])
        starts_BS = np.zeros_like(positions_BS)
        np.multiply(is_eos_BS[:, :-1], index_S[1:], out=starts_BS[:, 1:])
        positions_BS -= np.maximum.accumulate(starts_BS, axis=1, out=starts_BS)
        return
    row_before, document = -1, 0
    for place in ends.tolist():
        row, end = divmod(place, seq_len)
        document = document + 1 if row == row_before else 1
        row_before = row
        positions_BS[row, end + 1 :] = index_S[: seq_len - end - 1]
        doc_ids_BS[row, end + 1 :] = document


def join_rows(parts: Sequence[Rows], *, seq_len: int, eos_id: int) -> Rows:
    """One row from the rows of several spans behind each other: each begins a document. What is missing is EOS without a label."""
    missing = seq_len - sum(part.tokens_BS.shape[1] for part in parts)
    if missing:
        parts = [*parts, phantom_rows(1, seq_len=missing)._replace(tokens_BS=np.full((1, missing), eos_id, dtype=np.int64))]
    doc_ids, before = [], 0
    for part in parts:
        doc_ids.append(part.doc_ids_BS + before)
        before = int(doc_ids[-1][0, -1]) + 1
    return Rows(
        tokens_BS=np.concatenate([part.tokens_BS for part in parts], axis=1),
        labels_BS=np.concatenate([part.labels_BS for part in parts], axis=1),
        positions_BS=np.concatenate([part.positions_BS for part in parts], axis=1),
        doc_ids_BS=np.concatenate(doc_ids, axis=1),
        num_live_B=np.sum([part.num_live_B for part in parts], axis=0),
    )


def phantom_rows(num_rows: int, *, seq_len: int) -> Rows:
    """Rows that no sample fills: one document of token 0 without a label."""
    shape = (num_rows, seq_len)
    return Rows(
        tokens_BS=np.zeros(shape, dtype=np.int64),
        labels_BS=np.full(shape, IGNORED_LABEL, dtype=np.int64),
        positions_BS=np.broadcast_to(np.arange(seq_len, dtype=np.int64), shape).copy(),
        doc_ids_BS=np.zeros(shape, dtype=np.int64),
        num_live_B=np.zeros(num_rows, dtype=np.int64),
    )
