"""Writing the shards of one split. Same documents, same bytes: no clock, no absolute path and no machine enters a file."""

from __future__ import annotations

import contextlib
import io
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from surefoot.core.durable import write_atomic
from surefoot.core.hashing import sha256_file
from surefoot.data.documents import Document
from surefoot.data.manifest import ShardEntry, SplitEntry
from surefoot.data.shards import BLOCK_BYTES, HEADER_BYTES, LEN_STRIDE, pack_header

SHARD_BYTES: Final = 1 << 30


class SplitWriter:
    """Appends documents to numbered shards in `folder`; a shard is closed by the first document that fills it."""

    def __init__(self, folder: Path, *, dtype: np.dtype[Any], shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._shard: _ShardWriter | None = None
        self._entries: list[ShardEntry] = []
        self._text_bytes = 0
        folder.mkdir(parents=True)

    def add(self, document: Document, *, token_ids: npt.NDArray[Any], digest: bytes) -> None:
        """Append one document. `token_ids` ends in EOS and `digest` is the sha256 of its text."""
        if self._shard is None:
            self._shard = _ShardWriter(self._folder, name=f"{len(self._entries):05d}", dtype=self._dtype)
        self._shard.add(document, token_ids=token_ids, digest=digest)
        self._text_bytes += len(document.text.encode())
        if self._shard.num_token_bytes >= self._shard_bytes:
            self._finish_shard()

    def finish(self) -> SplitEntry:
        """Close the last shard, with everything on disk. OSError when the disk is full."""
        self._finish_shard()
        return SplitEntry(
            shards=tuple(self._entries),
            tokens=sum(entry.tokens for entry in self._entries),
            docs=sum(entry.docs for entry in self._entries),
            text_bytes=self._text_bytes,
        )

    def abandon(self) -> None:
        """Release the open file after a failure; what was written is worthless."""
        if self._shard is not None:
            self._shard.abandon()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._entries.append(self._shard.finish())
            self._shard = None


class _ShardWriter:
    def __init__(self, folder: Path, *, name: str, dtype: np.dtype[Any]) -> None:
        self._base = folder / name
        self._name = name
        self._dtype = dtype
        self._file: BinaryIO = self._base.with_suffix(".tok").open("wb")
        self._file.write(bytes(HEADER_BYTES))
        self._pending = bytearray()
        self._sums = array("Q")
        self._lengths = array("I")
        self._provenance = _Provenance()
        self.num_token_bytes = 0

    def add(self, document: Document, *, token_ids: npt.NDArray[Any], digest: bytes) -> None:
        self._pending += token_ids.astype(self._dtype).tobytes()
        self._lengths.append(len(token_ids))
        self._provenance.add(document, digest=digest)
        self.num_token_bytes += len(token_ids) * self._dtype.itemsize
        whole = len(self._pending) // BLOCK_BYTES * BLOCK_BYTES
        self._write_blocks(bytes(self._pending[:whole]))
        del self._pending[:whole]

    def finish(self) -> ShardEntry:
        self._write_blocks(bytes(self._pending))
        num_tokens = self.num_token_bytes // self._dtype.itemsize
        self._file.seek(0)
        self._file.write(pack_header(token_bytes=self._dtype.itemsize, num_tokens=num_tokens, num_docs=len(self._lengths)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_atomic(self._base.with_suffix(".sum"), np.array(self._sums, dtype="<u8").tobytes())
        write_atomic(self._base.with_suffix(".len"), _pack_lengths(self._lengths))
        write_atomic(self._base.with_suffix(".src.parquet"), self._provenance.as_parquet())
        path = self._base.with_suffix(".tok")
        return ShardEntry(name=self._name, tokens=num_tokens, docs=len(self._lengths), bytes=path.stat().st_size, sha256=sha256_file(path))

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
            self._file.close()

    def _write_blocks(self, data: bytes) -> None:
        self._file.write(data)
        view = memoryview(data)
        for begin in range(0, len(data), BLOCK_BYTES):
            self._sums.append(xxhash.xxh3_64_intdigest(view[begin : begin + BLOCK_BYTES]))


class _Provenance:
    """Columns of `.src.parquet`: doc_hash (first 16 bytes of the sha256), file, record, byte_offset, byte_length."""

    def __init__(self) -> None:
        self._hashes = bytearray()
        self._file_numbers = array("i")
        self._files: dict[str, int] = {}
        self._records, self._offsets, self._lengths = array("q"), array("q"), array("q")

    def add(self, document: Document, *, digest: bytes) -> None:
        self._hashes += digest[:16]
        self._file_numbers.append(self._files.setdefault(document.file, len(self._files)))
        self._records.append(document.record)
        self._offsets.append(document.byte_offset)
        self._lengths.append(document.byte_length)

    def as_parquet(self) -> bytes:
        num_rows = len(self._records)
        files = pa.DictionaryArray.from_arrays(
            pa.array(np.array(self._file_numbers, dtype=np.int32)), pa.array(list(self._files), pa.string())
        )
        columns = {
            "doc_hash": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), num_rows, [None, pa.py_buffer(bytes(self._hashes))]),
            "file": files,
            "record": pa.array(np.array(self._records, dtype=np.int64)),
            "byte_offset": pa.array(np.array(self._offsets, dtype=np.int64)),
            "byte_length": pa.array(np.array(self._lengths, dtype=np.int64)),
        }
        sink = io.BytesIO()
        pq.write_table(pa.table(columns), sink, compression="zstd")
        return sink.getvalue()


def _pack_lengths(lengths: array[int]) -> bytes:
    counts = np.array(lengths, dtype="<u4")
    firsts = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(counts, dtype=np.uint64)])[: len(counts)]
    data = counts.tobytes()
    return data + bytes(-len(data) % 8) + firsts[::LEN_STRIDE].astype("<u8").tobytes()
