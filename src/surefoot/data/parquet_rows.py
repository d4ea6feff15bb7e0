"""Parquet files as parts of rows: the one column that holds the texts, a batch at a time.

Batches are counted within each row group, for a pass that goes on begins with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from surefoot.core.errors import DataError
from surefoot.data.corpus import CorpusFile
from surefoot.data.parts import Cut, Part, Place

_BATCH_ROWS: Final = 256
_READ_BYTES: Final = 1 << 20
_COLUMN: Final = "text"


def cut_rows(file: CorpusFile, *, text_field: str, begin: Place, room: Callable[[], int]) -> Iterator[Cut]:
    """Runs of rows, each closed by the batch that fills the chunk; of a damaged file, the rows before the damage and a part that says so.

    Raises DataError when there is no such column, or one that holds no text: every row would be a bad record.
    """
    place, batches = begin, list[pa.RecordBatch]()

    def take() -> Cut:
        nonlocal place, batches
        part = Part("parquet", place, _pack(batches))
        row = place.record + sum(batch.num_rows for batch in batches)
        place, batches = Place(place.file, row, row), []
        return Cut(part, place, int(file.num_bytes * row / max(1, num_rows)))

    num_rows = 0
    try:
        with pq.ParquetFile(file.path, buffer_size=_READ_BYTES, pre_buffer=False) as parquet:
            _check_column(parquet, text_field=text_field, name=file.name)
            num_rows = parquet.metadata.num_rows
            for batch in _batches(parquet, column=text_field, first_row=begin.record):
                batches.append(batch)
                if sum(held.nbytes for held in batches) >= room():
                    yield take()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if batches:
            yield take()
        reason = f"the Parquet file is damaged from this row on: {_first_line(error)}"
        yield Cut(Part("parquet", place, reason=reason), Place(place.file + 1), file.num_bytes)
        return
    if batches:
        yield take()


def values_of(data: bytes) -> Iterator[bytes | None]:
    """The values of a part in order; None where there is none."""
    with pa.ipc.open_stream(data) as reader:
        for batch in reader:
            yield from batch.column(0).to_pylist()


def _batches(parquet: pq.ParquetFile, *, column: str, first_row: int) -> Iterator[pa.RecordBatch]:
    """From `first_row` on, the first of a batch. Row groups before it are not read."""
    for group in range(parquet.num_row_groups):
        num_rows = parquet.metadata.row_group(group).num_rows
        if first_row >= num_rows:
            first_row -= num_rows
            continue
        for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=[column], use_threads=False):
            skipped = min(first_row, batch.num_rows)
            first_row -= skipped
            if skipped < batch.num_rows:
                yield _as_bytes(batch.column(0).slice(skipped))


def _as_bytes(values: Any) -> pa.RecordBatch:
    """Bytes, since a Parquet file may call text what is no UTF-8."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return pa.record_batch([values.cast(pa.large_binary())], names=[_COLUMN])


def _pack(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _check_column(parquet: pq.ParquetFile, *, text_field: str, name: str) -> None:
    schema = parquet.schema_arrow
    if text_field not in schema.names:
        has = ", ".join(schema.names[:8]) or "none"
        hint = "`surefoot data prepare --text-field NAME` reads another, or leave the file out"
        raise DataError(f"no column {text_field!r}; the file has {has}", where=name, hint=hint)
    kind = schema.field(text_field).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_text(value) for is_text in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)):
        hint = "name the column of texts with --text-field"
        raise DataError(f"column {text_field!r} is {kind}, wanted text", where=name, hint=hint)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
