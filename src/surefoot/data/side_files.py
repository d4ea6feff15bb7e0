"""The files beside a shard that tell documents apart, read by ranges: a shard of a gibibyte has them with a million documents in.

`.len`          '<u4' tokens of each document, padded to 8 bytes, then the first token of every 1,024th as '<u8'
`.idx`          '<u8' first 8 bytes of each document's hash as a big-endian number, ascending, then their document numbers as '<u4'
`.src.parquet`  a row per document: doc_hash, file, record, byte_offset, byte_length
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError
from surefoot.data.shards import LEN_STRIDE
from surefoot.data.storage import ByteRange, Storage

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

I64Array = npt.NDArray[np.int64]

ORIGIN_COLUMNS: Final = ("doc_hash", "file", "record", "byte_offset", "byte_length")
_HINT: Final = "restore the file from a copy, or prepare the data again with --force"
_WINDOW: Final = 2048
"""Entries of an index that are read at once, 16 KiB. Of 500,000 uniform hashes 99.5% lie within 1,024 of where they are foretold."""
_MAX_KEY: Final = (1 << 64) - 1


class SideFile:
    """A file of a prepared folder that is read by ranges. Raises DataError when it is not there or holds less than is asked for."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self.name = storage, name

    @property
    def where(self) -> str:
        return f"{self._storage.place}/{self.name}"

    def bytes_at(self, offset: int, num_bytes: int) -> bytes:
        wanted = ByteRange(self.name, offset, num_bytes)
        got = next(bytes(view) for view in self._storage.ranges([wanted]))
        if len(got) < num_bytes:
            raise DataError(f"it is cut short: {num_bytes} bytes wanted at {offset}, got {len(got)}", where=self.where, hint=_HINT)
        return got

    def read(self, offset: int, count: int, *, dtype: str) -> npt.NDArray[Any]:
        """`count` items of `dtype` from byte `offset` on."""
        return np.frombuffer(self.bytes_at(offset, count * np.dtype(dtype).itemsize), dtype=dtype)


class Lengths:
    """Where each document of a shard begins, in tokens of the shard. One read of 8 bytes per 1,024 documents, then 4 KiB a look-up."""

    def __init__(self, file: SideFile, *, num_docs: int, num_tokens: int) -> None:
        self._num_docs, self._num_tokens = num_docs, num_tokens
        self._file = file
        counts_bytes = -(-4 * num_docs // 8) * 8
        self._firsts = self._file.read(counts_bytes, -(-num_docs // LEN_STRIDE), dtype="<u8").astype(np.int64)

    def bounds(self, first_doc: int, end_doc: int) -> I64Array:
        """The first token of each document in [first_doc, end_doc), and behind them where the last one ends."""
        stride = first_doc // LEN_STRIDE
        counts = self._file.read(4 * stride * LEN_STRIDE, end_doc - stride * LEN_STRIDE, dtype="<u4").astype(np.int64)
        bounds = int(self._firsts[stride]) + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        if bounds[-1] > self._num_tokens:
            raise DataError(f"documents end at token {bounds[-1]} of {self._num_tokens}", where=self._file.where, hint=_HINT)
        return bounds[first_doc - stride * LEN_STRIDE :]

    def documents_in(self, start: int, end: int) -> tuple[int, int]:
        """[first, end) of the documents that hold a token of [start, end)."""
        return self._document_at(start), self._document_at(end - 1) + 1

    def _document_at(self, token: int) -> int:
        stride = int(np.searchsorted(self._firsts, token, side="right")) - 1
        first = stride * LEN_STRIDE
        bounds = self.bounds(first, min(first + LEN_STRIDE, self._num_docs))
        return first + int(np.searchsorted(bounds, token, side="right")) - 1


def documents_by_hash(storage: Storage, indexes: Sequence[tuple[str, int]], *, low: int, high: int) -> list[list[int]]:
    """From each `.idx` file (name, documents): those whose hash begins with 8 bytes from `low` to `high`, both included.

    All files are looked into at once, where a uniform key would lie; the few whose key lies elsewhere are searched. Some 16 KiB of each.
    """
    windows = [_window(num_docs, _foretold(low, num_docs)) for _, num_docs in indexes]
    wanted = [ByteRange(name, 8 * begin, 8 * (end - begin)) for (name, _), (begin, end) in zip(indexes, windows, strict=True)]
    found: list[tuple[int, int] | None] = []
    for (_, num_docs), (begin, end), view in zip(indexes, windows, storage.ranges(wanted), strict=True):
        keys = np.frombuffer(view, dtype="<u8", count=len(view) // 8)
        first, last = (int(place) for place in (keys.searchsorted(np.uint64(low)), keys.searchsorted(np.uint64(high), side="right")))
        is_inside = len(keys) == end - begin and (first > 0 or begin == 0) and (last < len(keys) or end == num_docs)
        found.append((begin + first, begin + last) if is_inside else None)
    numbers = []
    for (name, num_docs), place in zip(indexes, found, strict=True):
        file = SideFile(storage, name)
        first, end = place or (_rank(file, num_docs=num_docs, key=low), _rank(file, num_docs=num_docs, key=high + 1))
        numbers.append(file.read(8 * num_docs + 4 * first, end - first, dtype="<u4").tolist() if end > first else [])
    return numbers


def _rank(file: SideFile, *, num_docs: int, key: int) -> int:
    """How many keys of an index are less than `key`. Interpolates twice, then halves what is left, whatever the keys are."""
    first, end = 0, num_docs
    below, above = 0, 1 << 64
    num_misses = 0
    while first < end:
        share = (key - below) / (above - below) if num_misses < 2 else 0.5
        begin, stop = _window(end - first, int((end - first) * share))
        keys = file.read(8 * (first + begin), stop - begin, dtype="<u8")
        place = int(keys.searchsorted(np.uint64(key))) if key <= _MAX_KEY else len(keys)
        if place == 0 and begin > 0:
            end, above = first + begin, int(keys[0])
        elif place == len(keys) and stop < end - first:
            first, below = first + stop, int(keys[-1])
        else:
            return first + begin + place
        num_misses += 1
    return first


def _foretold(key: int, num_docs: int) -> int:
    return key * num_docs >> 64


def _window(size: int, middle: int) -> tuple[int, int]:
    """[begin, end) of at most _WINDOW of `size` entries around `middle`."""
    begin = max(0, min(middle - _WINDOW // 2, size - _WINDOW))
    return begin, min(size, begin + _WINDOW)


class _Seekable(io.RawIOBase):
    """A side file as pyarrow wants one: what it seeks and reads becomes a read by range."""

    def __init__(self, file: SideFile, *, num_bytes: int) -> None:
        super().__init__()
        self._file, self._num_bytes, self._position = file, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._num_bytes - self._position)
        data = self._file.bytes_at(self._position, left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data


class Origins:
    """The rows of a `.src.parquet`, by document number. Reads the row groups that hold them, and keeps the last one."""

    def __init__(self, file: SideFile, *, num_bytes: int, num_docs: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._where = file.where
        try:
            self._file: pq.ParquetFile = pq.ParquetFile(pa.PythonFile(_Seekable(file, num_bytes=num_bytes), mode="r"))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"it cannot be read: {error}", where=self._where, hint=_HINT) from error
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        if metadata.num_rows != num_docs:
            raise DataError(f"it has {metadata.num_rows} rows, the manifest says {num_docs}", where=self._where, hint=_HINT)
        self._last: tuple[tuple[int, tuple[str, ...]], pa.Table] | None = None

    def rows(self, first_doc: int, end_doc: int) -> list[dict[str, Any]]:
        """One mapping of `ORIGIN_COLUMNS` per document of [first_doc, end_doc)."""
        rows: list[dict[str, Any]] = []
        for group, begin, end in self._groups(first_doc, end_doc):
            here = max(begin, first_doc)
            rows += self._read(group, ORIGIN_COLUMNS).slice(here - begin, min(end, end_doc) - here).to_pylist()
        return rows

    def by_hash(self, prefix: bytes) -> list[int]:
        """Documents whose hash begins with `prefix`. Goes through all of them: for shards of a format that has no `.idx`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found: list[int] = []
        for group, begin, _ in self._groups(0, self._ends[-1] if self._ends else 0):
            hashes = self._read(group, ("doc_hash",)).column("doc_hash").cast(pa.binary())
            found += _places(pc.starts_with(hashes, prefix), after=begin)
        return found

    def of_file(self, name: str) -> list[tuple[int, int]]:
        """[first, end) of the runs of documents that came from `name`. Row groups whose bounds leave it out are not read."""
        import pyarrow.compute as pc

        places: list[int] = []
        for group, begin, _ in self._groups(0, self._ends[-1] if self._ends else 0):
            if self._may_hold(group, name):
                places += _places(pc.equal(self._read(group, ("file",)).column("file"), name), after=begin)
        return runs_of(places)

    def file_names(self, *, limit: int) -> set[str]:
        """Some names of files, at most about `limit`: for a message."""
        names: set[str] = set()
        for group, _, _ in self._groups(0, self._ends[-1] if self._ends else 0):
            names.update(self._read(group, ("file",)).column("file").unique().to_pylist())
            if len(names) >= limit:
                break
        return names

    def close(self) -> None:
        self._file.close()

    def _groups(self, first_doc: int, end_doc: int) -> Iterator[tuple[int, int, int]]:
        """(row group, its first document, its end) of each that holds one of [first_doc, end_doc)."""
        begin = 0
        for group, end in enumerate(self._ends):
            if begin < end_doc and end > first_doc:
                yield group, begin, end
            begin = end

    def _read(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        import pyarrow as pa

        if self._last is None or self._last[0] != (group, columns):
            try:
                self._last = (group, columns), self._file.read_row_group(group, columns=list(columns), use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"row group {group} cannot be read: {error}", where=self._where, hint=_HINT) from error
        return self._last[1]

    def _may_hold(self, group: int, name: str) -> bool:
        metadata = self._file.metadata.row_group(group)
        column = next(number for number in range(metadata.num_columns) if metadata.column(number).path_in_schema == "file")
        bounds = metadata.column(column).statistics
        return bounds is None or not bounds.has_min_max or bool(bounds.min <= name <= bounds.max)


def _places(is_wanted: pa.ChunkedArray, *, after: int) -> list[int]:
    numbers: list[int] = (np.flatnonzero(is_wanted.to_numpy()) + after).tolist()
    return numbers


def runs_of(places: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as [first, end) of their runs without a gap."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return runs
