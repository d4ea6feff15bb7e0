"""What is kept of each stored document until its shard is closed: a row of fixed width, which becomes the files beside the tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.data.quality.minhash import NUM_BINS
from surefoot.data.shards import LEN_STRIDE
from surefoot.data.side_files import sealed

ROW: Final = np.dtype(
    [
        ("hash", "u1", (16,)),  # the first half of the sha256 of the text
        ("file", "<u4"),
        ("record", "<i8"),
        ("offset", "<i8"),
        ("length", "<i8"),
        ("tokens", "<u4"),
        ("text_bytes", "<u4"),
        ("signature", "<u2", (NUM_BINS,)),
    ]
)
_ROWS_PER_GROUP: Final = 1 << 13  # a reader that wants one document unpacks so many rows

Rows = npt.NDArray[Any]


def lengths_file(rows: Rows) -> bytes:
    """`.len`"""
    counts = rows["tokens"].astype("<u4")
    firsts = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(counts, dtype=np.uint64)])[: len(counts)]
    data = counts.tobytes()
    return data + bytes(-len(data) % 8) + firsts[::LEN_STRIDE].astype("<u8").tobytes()


def index_file(rows: Rows) -> bytes:
    """`.idx`: the first 8 bytes of each hash as a number, ascending, then the documents they are of."""
    keys = np.ascontiguousarray(rows["hash"][:, :8]).view(">u8").reshape(-1).astype("<u8")
    order = np.argsort(keys, kind="stable")
    return keys[order].tobytes() + order.astype("<u4").tobytes()


def signatures_file(rows: Rows) -> bytes:
    """`.sig`"""
    return np.ascontiguousarray(rows["signature"]).tobytes()


def origins_file(rows: Rows, *, files: Sequence[str]) -> bytes:
    """`.src.parquet`. `files` are the names that the rows number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers, firsts, inverse = np.unique(rows["file"], return_index=True, return_inverse=True)
    by_appearance = np.argsort(firsts)
    rank = np.empty(len(numbers), dtype=np.int32)
    rank[by_appearance] = np.arange(len(numbers), dtype=np.int32)
    names = pa.array([files[number] for number in numbers[by_appearance]], pa.string())
    hashes = pa.py_buffer(np.ascontiguousarray(rows["hash"]).tobytes())
    columns = {
        "doc_hash": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(rows), [None, hashes]),
        "file": pa.DictionaryArray.from_arrays(pa.array(rank[inverse.reshape(-1)]), names),
        "record": pa.array(rows["record"].astype(np.int64)),
        "byte_offset": pa.array(rows["offset"].astype(np.int64)),
        "byte_length": pa.array(rows["length"].astype(np.int64)),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd", row_group_size=_ROWS_PER_GROUP, write_page_checksum=True)
    return sealed(sink.getvalue())
