"""The files beside a shard that tell documents apart, read by ranges: a shard of a gibibyte has them with a million documents in.

`.len`          '<u4' tokens of each document, padded to 8 bytes, then the first token of every 1,024th as '<u8'
`.idx`          '<u8' first 8 bytes of each document's hash as a big-endian number, ascending, then their document numbers as '<u4'
`.src.parquet`  a row per document: doc_hash, file, record, byte_offset, byte_length; its pages have checksums, and before its metadata,
                where Parquet reads nothing, 8 bytes "SFfooter" and the xxh3_64 of all that follows
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from surefoot.core.errors import DataError
from surefoot.data.shards import LEN_STRIDE
from surefoot.data.storage import ByteRange, Storage

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

I64Array = npt.NDArray[np.int64]

ORIGIN_COLUMNS: Final = ("doc_hash", "file", "record", "byte_offset", "byte_length")
DAMAGED_FILE: Final = "damaged-file"
"""Kind of the DataError for a file beside a shard that is not what was written."""
_HINT: Final = "restore the file from a copy, or prepare the data again with --force"
_WINDOW: Final = 2048
"""Entries of an index that are read at once, 16 KiB. Of 500,000 uniform hashes 99.5% lie within 1,024 of where they are foretold."""
_TAIL_BYTES: Final = 64 * 1024  # the metadata of 100 row groups
_SEAL: Final = struct.Struct("<8sQ")
_SEAL_MAGIC: Final = b"SFfooter"
_FOOTER_END_BYTES: Final = 8  # the length of the metadata, and PAR1
_MAX_KEY: Final = (1 << 64) - 1


class SideFile:
    """A file of a prepared folder that is read by ranges. Raises DataError when it is not there or holds less than is asked for."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self.name = storage, name

    @property
    def where(self) -> str:
        return f"{self._storage.place}/{self.name}"

    def damaged(self, what: str, **values: object) -> DataError:
        """The error for a file that is not what was written."""
        return DataError(what, where=self.where, hint=_HINT, kind=DAMAGED_FILE, **values)

    def num_bytes(self) -> int:
        return self._storage.num_bytes([self.name])[0]

    def bytes_at(self, offset: int, num_bytes: int) -> bytes:
        wanted = ByteRange(self.name, offset, num_bytes)
        got = next(bytes(view) for view in self._storage.ranges([wanted]))
        if len(got) < num_bytes:
            raise self.damaged(f"it is cut short: {num_bytes} bytes wanted at {offset}, got {len(got)}")
        return got

    def read(self, offset: int, count: int, *, dtype: str) -> npt.NDArray[Any]:
        """`count` items of `dtype` from byte `offset` on."""
        return np.frombuffer(self.bytes_at(offset, count * np.dtype(dtype).itemsize), dtype=dtype)


class Lengths:
    """Where each document of a shard begins, in tokens of the shard. One read of 8 bytes per 1,024 documents, then 4 KiB a look-up.

    Lengths are read with all that have a sum in common, and compared with it: one number that is not what was written is seen.
    """

    def __init__(self, file: SideFile, *, num_docs: int, num_tokens: int) -> None:
        self._num_docs = num_docs
        self._file = file
        counts_bytes = -(-4 * num_docs // 8) * 8
        firsts = self._file.read(counts_bytes, -(-num_docs // LEN_STRIDE), dtype="<u8").astype(np.int64)
        self._firsts, self._sums = firsts, np.append(firsts, num_tokens)
        if firsts[0] != 0 or (np.diff(self._sums) <= 0).any():
            raise self._file.damaged(f"the sums of its lengths do not go up from 0 to {num_tokens}")

    def bounds(self, first_doc: int, end_doc: int) -> I64Array:
        """The first token of each document in [first_doc, end_doc), and behind them where the last one ends."""
        stride, end_stride = first_doc // LEN_STRIDE, -(-end_doc // LEN_STRIDE)
        first = stride * LEN_STRIDE
        counts = self._file.read(4 * first, min(end_stride * LEN_STRIDE, self._num_docs) - first, dtype="<u4").astype(np.int64)
        bounds = int(self._firsts[stride]) + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        got, wanted = np.append(bounds[:-1:LEN_STRIDE], bounds[-1]), self._sums[stride : end_stride + 1]
        if (got != wanted).any():
            wrong = int(np.flatnonzero(got != wanted)[0])
            before = min(first + wrong * LEN_STRIDE, self._num_docs)
            raise self._file.damaged(f"its first {before} documents have {got[wrong]} tokens by their lengths, {wanted[wrong]} by the sums")
        return bounds[first_doc - first : end_doc - first + 1]

    def documents_in(self, start: int, end: int) -> tuple[int, int]:
        """[first, end) of the documents that hold a token of [start, end)."""
        return self._document_at(start), self._document_at(end - 1) + 1

    def _document_at(self, token: int) -> int:
        stride = int(np.searchsorted(self._firsts, token, side="right")) - 1
        first = stride * LEN_STRIDE
        bounds = self.bounds(first, min(first + LEN_STRIDE, self._num_docs))
        return first + int(np.searchsorted(bounds, token, side="right")) - 1


def documents_by_hash(storage: Storage, indexes: Sequence[tuple[str, int]], *, keys: Sequence[tuple[int, int]]) -> list[list[int]]:
    """From each `.idx` file (name, documents): those whose hash begins with 8 bytes from low to high of its `keys`, both included.

    All files are looked into at once, where a uniform key would lie; the few whose key lies elsewhere are searched. Some 16 KiB of each.
    Raises DataError for hashes that are not in order.
    """
    windows = [_window(num_docs, _foretold(low, num_docs)) for (_, num_docs), (low, _) in zip(indexes, keys, strict=True)]
    wanted = [ByteRange(name, 8 * begin, 8 * (end - begin)) for (name, _), (begin, end) in zip(indexes, windows, strict=True)]
    found: list[tuple[int, int] | None] = []
    for (name, num_docs), (begin, end), (low, high), view in zip(indexes, windows, keys, storage.ranges(wanted), strict=True):
        here = _in_order(np.frombuffer(view, dtype="<u8", count=len(view) // 8), SideFile(storage, name))
        first, last = (int(place) for place in (here.searchsorted(np.uint64(low)), here.searchsorted(np.uint64(high), side="right")))
        is_inside = len(here) == end - begin and (first > 0 or begin == 0) and (last < len(here) or end == num_docs)
        found.append((begin + first, begin + last) if is_inside else None)
    numbers = []
    for (name, num_docs), (low, high), place in zip(indexes, keys, found, strict=True):
        file = SideFile(storage, name)
        first, end = place or (_rank(file, num_docs=num_docs, key=low), _rank(file, num_docs=num_docs, key=high + 1))
        numbers.append(_numbers(file, first, end, num_docs=num_docs) if end > first else [])
    return numbers


def _in_order(keys: npt.NDArray[Any], file: SideFile) -> npt.NDArray[Any]:
    if (keys[1:] < keys[:-1]).any():
        raise file.damaged("its hashes are not in order")
    return keys


def _numbers(file: SideFile, first: int, end: int, *, num_docs: int) -> list[int]:
    """The documents that an index has at [first, end)."""
    numbers: list[int] = file.read(8 * num_docs + 4 * first, end - first, dtype="<u4").tolist()
    if max(numbers) >= num_docs:
        raise file.damaged(f"it names document {max(numbers)} of {num_docs}")
    return numbers


def _rank(file: SideFile, *, num_docs: int, key: int) -> int:
    """How many keys of an index are less than `key`. Interpolates twice, then halves what is left, whatever the keys are."""
    first, end = 0, num_docs
    below, above = 0, 1 << 64
    num_misses = 0
    while first < end:
        share = (key - below) / (above - below) if num_misses < 2 else 0.5
        begin, stop = _window(end - first, int((end - first) * share))
        keys = _in_order(file.read(8 * (first + begin), stop - begin, dtype="<u8"), file)
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


@dataclass(frozen=True, slots=True)
class Footer:
    """The metadata at the end of a Parquet file of `end` bytes. `is_sealed`: it is what its checksum says; files of before have none."""

    data: bytes
    end: int
    is_sealed: bool


def sealed(parquet: bytes) -> bytes:
    """A Parquet file with the checksum of its metadata before it: pages have their own, and Arrow trusts metadata until it crashes."""
    begin = len(parquet) - _FOOTER_END_BYTES - int.from_bytes(parquet[-8:-4], "little")
    return parquet[:begin] + _SEAL.pack(_SEAL_MAGIC, xxh3_64_intdigest(parquet[begin:])) + parquet[begin:]


def read_footer(file: SideFile) -> Footer:
    """Raises DataError for one that is not what was written, where its checksum says so."""
    end = file.num_bytes()
    tail = file.bytes_at(max(0, end - _TAIL_BYTES), min(end, _TAIL_BYTES))
    if tail[-4:] != b"PAR1":
        raise file.damaged("it does not end as Parquet does")
    num_bytes = _FOOTER_END_BYTES + int.from_bytes(tail[-8:-4], "little")
    wanted = num_bytes + _SEAL.size
    if wanted > end:
        raise file.damaged(f"its metadata should have {num_bytes} bytes, all of it has {end}")
    data = (tail if wanted <= len(tail) else file.bytes_at(end - wanted, wanted))[-wanted:]
    magic, digest = _SEAL.unpack_from(data)
    footer = data[_SEAL.size :]
    if magic == _SEAL_MAGIC and digest != xxh3_64_intdigest(footer):
        raise file.damaged(f"its metadata has checksum {xxh3_64_intdigest(footer):016x}, written was {digest:016x}")
    return Footer(footer, end, is_sealed=magic == _SEAL_MAGIC)


class Origins:
    """The rows of a `.src.parquet`, by document number. Reads the row groups that hold them, and keeps the last one.

    Parquet is read from memory that we filled: of a file of Python's Arrow asks in a thread of its own, which may still be at it when the
    interpreter ends, and then ends the process with SIGABRT.
    """

    def __init__(self, file: SideFile, *, footer: Footer, num_docs: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._file, self._num_bytes = file, footer.end
        try:
            self._metadata: pq.FileMetaData = pq.read_metadata(pa.BufferReader(footer.data))
            metadata = self._metadata
            self._ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        except (OSError, pa.ArrowException) as error:
            raise file.damaged(f"it cannot be read: {error}") from error
        if metadata.num_rows != num_docs or (self._ends or [0])[-1] != num_docs:
            raise file.damaged(f"it has {metadata.num_rows} rows, the manifest says {num_docs}")
        if not set(ORIGIN_COLUMNS) <= set(metadata.schema.names):
            raise file.damaged(f"its columns are {', '.join(metadata.schema.names)}")
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
                self._last = (group, columns), self._unpacked(group, columns)
            except (OSError, pa.ArrowException) as error:
                raise self._file.damaged(f"row group {group} cannot be read: {error}") from error
        return self._last[1]

    def _unpacked(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        """The columns of one row group, out of memory as long as the file, of which only they are filled."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        row_group = self._metadata.row_group(group)
        chunks = [row_group.column(number) for number in range(row_group.num_columns)]
        wanted = [chunk for chunk in chunks if chunk.path_in_schema in columns]
        begins = [chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset for chunk in wanted]
        begin, end = min(begins), max(at + chunk.total_compressed_size for at, chunk in zip(begins, wanted, strict=True))
        if not 0 <= begin < end <= self._num_bytes:
            raise self._file.damaged(f"row group {group} should lie at bytes {begin}:{end} of {self._num_bytes}")
        buffer = pa.allocate_buffer(self._num_bytes)
        memoryview(buffer).cast("B")[begin:end] = self._file.bytes_at(begin, end - begin)
        reader = pq.ParquetFile(pa.BufferReader(buffer), metadata=self._metadata, page_checksum_verification=True)
        table = reader.read_row_group(group, columns=list(columns), use_threads=False)
        table.validate(full=True)  # checksums leave out what is before a page
        if table.num_rows != row_group.num_rows:
            raise self._file.damaged(f"row group {group} has {table.num_rows} rows, its metadata says {row_group.num_rows}")
        return table

    def _may_hold(self, group: int, name: str) -> bool:
        metadata = self._metadata.row_group(group)
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
