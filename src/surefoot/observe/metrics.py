"""The metrics store: one row per training step, in append-only Arrow IPC segments that are compacted to Parquet.

`metrics/steps-g<generation>-<n>.arrows` is an Arrow stream: the schema, then one record batch per step, each written by one system call.
So a killed writer loses nothing that was written, a power loss only what the kernel had not flushed yet, and any number may read meanwhile.
`metrics/steps-<n>.parquet` holds closed segments and names them in its metadata: a reader skips a segment that a Parquet file already has.
Columns are only ever added. Readers take the union of all schemas, with nulls where a file did not know a column yet.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.durable import fsync_dir, fsync_file
from surefoot.core.errors import Corrupt
from surefoot.core.records import StepReport

METRICS_FORMAT = 1
ROWS_PER_SEGMENT = 4096
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_FORMAT_KEY, _SEGMENTS_KEY = b"surefoot.format_version", b"surefoot.segments"
_SEGMENT_NAME = re.compile(r"steps-g(\d+)-(\d+)\.arrows")
_PARQUET_NAME = re.compile(r"steps-(\d+)\.parquet")
_ROW_KEY = ("generation", "attempt", "step")
_READ_TRIES = 5
_ROWS_PER_GROUP = 1024  # of a Parquet file: who asks for some steps reads the groups that have them

_BY_NAME = pa.map_(pa.utf8(), pa.float64())
_REPORT_FIELDS: tuple[tuple[str, pa.DataType], ...] = (
    ("step", pa.int64()),
    ("attempt", pa.int64()),
    ("generation", pa.int64()),
    ("loss", pa.float64()),
    ("num_live_tokens", pa.int64()),
    ("tokens", pa.int64()),
    ("grad_norm", pa.float64()),
    ("clip_scale", pa.float64()),
    ("lr", pa.float64()),
    ("action", pa.utf8()),
    ("next_sample", pa.int64()),
    ("step_s", pa.float64()),
    ("data_wait_s", pa.float64()),
    ("forward_backward_s", pa.float64()),
    ("exchange_s", pa.float64()),
    ("update_s", pa.float64()),
    ("save_s", pa.float64()),
    ("evaluate_s", pa.float64()),
    ("tokens_per_s", pa.float64()),
    ("cpu_s", pa.float64()),
    ("val_loss", pa.float64()),
    ("bits_per_byte", pa.float64()),
    ("saved", pa.utf8()),
    ("forward_s", pa.float64()),
    ("backward_s", pa.float64()),
    ("reduce_s", pa.float64()),
    ("device_tokens_per_s", pa.float64()),
    ("mfu", pa.float64()),
    ("memory_bytes", pa.int64()),
    ("num_nonfinite", pa.int64()),
    ("loss_scale", pa.float64()),
    ("lr_applied_ratio", pa.float64()),
    *((f"loss_{figure}_{window}", pa.float64()) for window in (128, 500) for figure in ("mean", "std", "p10", "p50", "p90")),
    ("rank_losses", pa.list_(pa.float64())),
    ("rank_tokens", pa.list_(pa.int64())),
    ("rank_norms", pa.list_(pa.float64())),
    ("group_norms", _BY_NAME),
    ("update_ratios", _BY_NAME),
    ("probes", _BY_NAME),
    ("canary_loss", pa.float64()),
    ("val_losses", _BY_NAME),
)
STEP_SCHEMA = pa.schema(
    [*_REPORT_FIELDS, ("time_utc", pa.timestamp("ms", tz="UTC")), ("mono_s", pa.float64())],
    metadata={_FORMAT_KEY: str(METRICS_FORMAT)},
)

_log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes the rows of one process. `write` never raises and never waits for a disk: what cannot be written is counted in `dropped`."""

    def __init__(self, run_dir: Path, *, generation: int, clock: Clock | None = None, rows_per_segment: int = ROWS_PER_SEGMENT) -> None:
        self.dropped = 0
        self._folder = run_dir / "metrics"
        self._generation = generation
        self._clock = clock or SystemClock()
        self._rows_per_segment = rows_per_segment
        self._fd = -1
        self._num_bytes = 0
        self._num_rows = 0

    def write(self, report: StepReport) -> None:
        """Append one row; about 0.1 ms. Readers see it at once."""
        try:
            if self._fd < 0 or self._num_rows >= self._rows_per_segment:
                self._next_segment()
            self._append(self._row(report).serialize())
            self._num_rows += 1
        except Exception as error:  # A sink's boundary: a step must not fail because it could not be written down.
            self.dropped += 1
            if self.dropped == 1:
                _log.warning("metrics row of step %d dropped, training goes on: %s", report.step, error)

    def close(self) -> None:
        """End the segment, so that it may be compacted."""
        if self._fd < 0:
            return
        with suppress(OSError):  # A segment without its end is read just as well.
            self._append(_END_OF_STREAM)
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1

    def _row(self, report: StepReport) -> pa.RecordBatch:
        values = [_column_value(getattr(report, name)) for name, _ in _REPORT_FIELDS]
        values += [datetime.fromisoformat(self._clock.utc()), self._clock.monotonic_s()]
        return pa.RecordBatch.from_arrays(
            [pa.array([value], type=field.type) for value, field in zip(values, STEP_SCHEMA, strict=True)], schema=STEP_SCHEMA
        )

    def _next_segment(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-g{self._generation}-{_next_number(self._folder, self._generation)}.arrows"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._num_bytes = self._num_rows = 0
        try:
            self._append(STEP_SCHEMA.serialize())
        except OSError:
            os.close(self._fd)
            self._fd = -1
            path.unlink(missing_ok=True)
            raise

    def _append(self, message: bytes | pa.Buffer) -> None:
        """One whole message or nothing: a half one would hide every later one from readers."""
        view = memoryview(message)
        offset = self._num_bytes
        try:
            while view:
                num_written = os.pwrite(self._fd, view, offset)
                view, offset = view[num_written:], offset + num_written
        except OSError:
            os.ftruncate(self._fd, self._num_bytes)
            raise
        self._num_bytes = offset


def _column_value(value: Any) -> Any:
    """A map is a list of pairs to Arrow; empty is null, as in the files of a version that did not know the column."""
    if isinstance(value, Mapping):
        return list(value.items()) or None
    return (list(value) or None) if isinstance(value, tuple) else value


def read_steps(run_dir: Path, *, newest: int | None = None, steps: range | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows, sorted by (generation, attempt, step), each once. Safe while others write and compact; torn or damaged ends are left out.

    With `newest`, at least so many of the newest rows, read from as few files as hold them. With `steps`, the rows of these steps alone.
    With `columns`, these alone, behind generation, attempt and step. A column that no file has is null, or left out if it is none of ours.
    """
    folder = run_dir / "metrics"
    wanted = tuple(dict.fromkeys((*_ROW_KEY, *columns))) if columns is not None else None
    for _ in range(_READ_TRIES):
        with suppress(FileNotFoundError):  # Compacted away while we read: its rows are in a Parquet file by now.
            return _unique(_read_files(folder, newest=newest, steps=steps, columns=wanted), columns=wanted)
    return _unique(_read_files(folder, newest=newest, steps=steps, columns=wanted), columns=wanted)


def compact(run_dir: Path) -> Path | None:
    """Move all closed segments into one new Parquet file; None when there are none. For the holder of the run's lock alone.

    Closed is what has its end mark, and everything but the newest segment of the newest generation. Killed at any moment, it neither loses
    a row nor shows one twice.
    """
    folder = run_dir / "metrics"
    covered = _covered(folder)
    for name in covered:
        (folder / name).unlink(missing_ok=True)
    segments = _segments(folder)
    closed = [path for path in segments if path != segments[-1] or _has_end(path)]
    if not closed:
        return None
    table = _unique(_concat([_read_segment(path) for path in closed]))
    number = 1 + max((_number_of(path) for path in _parquets(folder)), default=0)
    target = folder / f"steps-{number}.parquet"
    _publish(table.replace_schema_metadata({_FORMAT_KEY: str(METRICS_FORMAT), _SEGMENTS_KEY: json.dumps([p.name for p in closed])}), target)
    if pq.read_table(target, partitioning=None).num_rows != table.num_rows:
        raise Corrupt("a compacted metrics file reads back with other rows than were written", where=str(target), hint="check the disk")
    for path in closed:
        path.unlink()
    return target


def _publish(table: pa.Table, target: Path) -> None:
    temporary = target.with_suffix(".tmp")
    try:
        pq.write_table(table, temporary, compression="zstd", row_group_size=_ROWS_PER_GROUP)
        fsync_file(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(target.parent)


def _read_files(folder: Path, *, newest: int | None, steps: range | None, columns: Sequence[str] | None) -> list[pa.Table]:
    # Segments first: one that vanishes after this is either listed by a Parquet file below or missed by name, and then all is read again.
    segments = _segments(folder)
    covered = _covered(folder)
    readers = [(path, _read_segment) for path in reversed(segments) if path.name not in covered]
    readers += [(path, _read_parquet) for path in reversed(_parquets(folder))]
    tables: list[pa.Table] = []
    for path, read in readers:
        tables.append(_of_steps(read(path, steps=steps, columns=columns), steps))
        if newest is not None and sum(table.num_rows for table in tables) >= newest:
            break
    return tables


def _of_steps(table: pa.Table, steps: range | None) -> pa.Table:
    if steps is None:
        return table
    step = np.asarray(table.column("step"))
    return table.filter(pa.array((step >= steps.start) & (step < steps.stop)))


def _read_segment(path: Path, *, steps: range | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """A segment has no index: `steps` are left to the caller."""
    batches = []
    schema = STEP_SCHEMA
    content = path.read_bytes()
    try:
        options = pa.ipc.IpcReadOptions()
        if columns is not None:
            with pa.ipc.open_stream(content) as stream:
                options.included_fields = [place for place, name in enumerate(stream.schema.names) if name in columns]
        with pa.ipc.open_stream(content, options=options) as stream:
            schema = stream.schema
            while True:
                batches.append(stream.read_next_batch())
    except StopIteration:
        pass
    except (pa.ArrowException, OSError) as error:
        _log.debug("%s ends after %d rows: %s", path, len(batches), error)
    return pa.Table.from_batches(batches, schema=schema)


def _read_parquet(path: Path, *, steps: range | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            groups = [group for group in range(file.num_row_groups) if steps is None or _may_have(file.metadata.row_group(group), steps)]
            known = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
            return file.read_row_groups(groups, columns=known, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        _log.warning("%s is damaged and left out: %s", path, error)
        return STEP_SCHEMA.empty_table()


def _may_have(group: pq.RowGroupMetaData, steps: range) -> bool:
    places = (group.column(place) for place in range(group.num_columns))
    statistics = next((column.statistics for column in places if column.path_in_schema == "step"), None)
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min < steps.stop and statistics.max >= steps.start)


def _concat(tables: list[pa.Table], *, columns: Sequence[str] | None = None) -> pa.Table:
    ours = STEP_SCHEMA.empty_table()
    if columns is not None:
        ours = ours.select([name for name in columns if name in STEP_SCHEMA.names])
        tables = [table.select([name for name in table.schema.names if name in columns]) for table in tables]
    bare = [table.replace_schema_metadata(None) for table in [ours, *tables]]
    return pa.concat_tables(bare, promote_options="permissive")


def _unique(tables: list[pa.Table] | pa.Table, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Sorted by (generation, attempt, step); of equal ones the last written stays."""
    table = tables if isinstance(tables, pa.Table) else _concat(list(reversed(tables)), columns=columns)
    keys = [np.asarray(table.column(name).fill_null(-1)) for name in _ROW_KEY]
    order = np.lexsort(keys[::-1])
    is_last = np.ones(len(order), dtype=bool)
    if len(order) > 1:
        is_last[:-1] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    return table.take(pa.array(order[is_last]))


def _segments(folder: Path) -> list[Path]:
    """Oldest first."""
    found = [(match, path) for path in _names(folder) if (match := _SEGMENT_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]


def _parquets(folder: Path) -> list[Path]:
    return sorted((path for path in _names(folder) if _PARQUET_NAME.fullmatch(path.name)), key=_number_of)


def _names(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _number_of(path: Path) -> int:
    match = _PARQUET_NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _covered(folder: Path) -> set[str]:
    """Names of the segments whose rows a Parquet file already holds."""
    names: set[str] = set()
    for path in _parquets(folder):
        with suppress(pa.ArrowException, OSError, ValueError):
            metadata = pq.read_metadata(path).metadata or {}
            names.update(json.loads(metadata.get(_SEGMENTS_KEY, b"[]")))
    return names


def _next_number(folder: Path, generation: int) -> int:
    """Never a number that was used before, compacted ones included: readers would take the new segment for the old one."""
    used = {path.name for path in _segments(folder)} | _covered(folder)
    matches = [match for name in used if (match := _SEGMENT_NAME.fullmatch(name))]
    return 1 + max((int(match[2]) for match in matches if int(match[1]) == generation), default=0)


def _has_end(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() < len(_END_OF_STREAM):
            return False
        file.seek(-len(_END_OF_STREAM), os.SEEK_END)
        return file.read() == _END_OF_STREAM
