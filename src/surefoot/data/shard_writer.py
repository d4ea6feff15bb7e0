"""Writing the shards of one split. Same documents, same bytes: no clock, no absolute path and no machine enters a file."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from surefoot.core.durable import write_atomic
from surefoot.core.hashing import sha256_file
from surefoot.core.strict_json import dumps, loads
from surefoot.data.documents import Document
from surefoot.data.journal import Damaged, Mark, Spool, mark_from_json, mark_json
from surefoot.data.manifest import FileEntry, ShardEntry, SplitEntry
from surefoot.data.quality.minhash import signatures
from surefoot.data.shards import BLOCK_BYTES, HEADER_BYTES, pack_header
from surefoot.data.stored_rows import ROW, Rows, index_file, lengths_file, origins_file, signatures_file

SHARD_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class SplitState:
    """How far a split is on disk: shards that are closed, and what is good of the tokens and the rows of the open one."""

    num_closed: int
    text_bytes: int
    tokens: Mark | None = None
    rows: Mark | None = None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": mark_json(self.tokens), "rows": mark_json(self.rows)}


def split_state(value: Mapping[str, Any]) -> SplitState:
    return SplitState(**{**value, "tokens": mark_from_json(value["tokens"]), "rows": mark_from_json(value["rows"])})


class SplitWriter:
    """Appends documents to numbered shards in `folder`; a shard is closed by the first document that fills it.

    `files` are the names that rows number. What is only needed until the end lies in `work`. With the `state` that an earlier writer
    synced, this one goes on there: raises Damaged when that is not what lies on disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: np.dtype[Any],
        files: Sequence[str] = (),
        work: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
        state: SplitState | None = None,
    ) -> None:
        self._folder, self._work = folder, work or folder
        self._dtype = dtype
        self._files = list(files)
        self._shard_bytes = shard_bytes
        self._closed_rows: list[Path] = []
        for needed in (folder, self._work):
            needed.mkdir(parents=True, exist_ok=True)
        self._text_bytes = state.text_bytes if state else 0
        self._entries = [self._read_entry(number) for number in range(state.num_closed)] if state else []
        self._shard = self._open(state) if state and state.tokens else None

    def extend(self, tokens: npt.NDArray[Any], rows: Rows) -> None:
        """Append documents: their tokens in one piece, each ending in EOS, and a row each."""
        self._text_bytes += int(rows["text_bytes"].sum(dtype=np.int64))
        ends = np.cumsum(rows["tokens"], dtype=np.int64)
        first_row, first_token = 0, 0
        while first_row < len(rows):
            if self._shard is None:
                self._shard = self._open(None)
            room = -(-(self._shard_bytes - self._shard.num_token_bytes) // self._dtype.itemsize)
            end_row = min(len(rows), int(np.searchsorted(ends, first_token + room)) + 1)
            end_token = int(ends[end_row - 1])
            self._shard.extend(tokens[first_token:end_token], rows[first_row:end_row])
            if self._shard.num_token_bytes >= self._shard_bytes:
                self._close_shard()
            first_row, first_token = end_row, end_token

    def add(self, document: Document, *, token_ids: npt.NDArray[Any], digest: bytes) -> None:
        """Append one document. `token_ids` ends in EOS and `digest` is the sha256 of its text."""
        if document.file not in self._files:
            self._files.append(document.file)
        row = np.zeros(1, dtype=ROW)
        row["hash"] = np.frombuffer(digest[:16], dtype=np.uint8)
        row["file"], row["record"] = self._files.index(document.file), document.record
        row["offset"], row["length"] = document.byte_offset, document.byte_length
        row["tokens"], row["text_bytes"] = len(token_ids), len(document.text.encode())
        stored = token_ids.astype(self._dtype)
        row["signature"] = signatures([stored])
        self.extend(stored, row)

    def sync(self) -> SplitState:
        """Everything so far on disk, and the state that another writer goes on from."""
        tokens, rows = self._shard.sync() if self._shard else (None, None)
        return SplitState(num_closed=len(self._entries), text_bytes=self._text_bytes, tokens=tokens, rows=rows)

    def forget(self) -> None:
        """The last state is kept by the caller: rows of shards that were closed before it are not needed any more."""
        while self._closed_rows:
            self._closed_rows.pop().unlink(missing_ok=True)

    def finish(self) -> SplitEntry:
        """Close the last shard, with everything on disk. OSError when the disk is full."""
        self._close_shard()
        if self._work == self._folder:
            self.forget()
            for number in range(len(self._entries)):
                self._entry_path(number).unlink()
        return SplitEntry(
            shards=tuple(self._entries),
            tokens=sum(entry.tokens for entry in self._entries),
            docs=sum(entry.docs for entry in self._entries),
            text_bytes=self._text_bytes,
        )

    def abandon(self) -> None:
        """Release the open files, as after a failure."""
        if self._shard is not None:
            self._shard.abandon()

    def _open(self, state: SplitState | None) -> ShardWriter:
        name = f"{len(self._entries):05d}"
        tokens, rows = (state.tokens, state.rows) if state else (None, None)
        return ShardWriter(self._folder, name=name, rows=self._rows_path(name), dtype=self._dtype, marks=(tokens, rows))

    def _close_shard(self) -> None:
        if self._shard is None:
            return
        entry = self._shard.finish(files=self._files)
        write_atomic(self._entry_path(len(self._entries)), dumps(entry))
        self._closed_rows.append(self._rows_path(entry.name))
        self._entries.append(entry)
        self._shard = None

    def _rows_path(self, name: str) -> Path:
        return self._work / f"{name}.rows"

    def _entry_path(self, number: int) -> Path:
        return self._work / f"{number:05d}.json"

    def _read_entry(self, number: int) -> ShardEntry:
        """Of a closed shard, what was noted when it was closed. Sizes are compared; bytes are checked when they are read."""
        try:
            value = loads(self._entry_path(number).read_bytes())
            entry = ShardEntry(**{**value, "files": {suffix: FileEntry(**file) for suffix, file in value["files"].items()}})
            sizes = {"tok": entry.bytes, **{suffix: file.bytes for suffix, file in entry.files.items()}}
            if all((self._folder / f"{entry.name}.{suffix}").stat().st_size == size for suffix, size in sizes.items()):
                return entry
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"shard {number} cannot be read: {error}") from error
        raise Damaged(f"shard {number} is not what was written")


class ShardWriter:
    """One open shard, `folder`/`name`: its tokens with their checksums, and a row per document in the file `rows`.

    `marks` are what an interrupted writer synced of both.
    """

    def __init__(
        self, folder: Path, *, name: str, rows: Path, dtype: np.dtype[Any], marks: tuple[Mark | None, Mark | None] = (None, None)
    ) -> None:
        self._base = folder / name
        self._name = name
        self._dtype = dtype
        self._tokens = Spool(self._base.with_suffix(".tok"), mark=marks[0], header_bytes=HEADER_BYTES)
        try:
            self._rows = Spool(rows, mark=marks[1])
        except BaseException:
            self._tokens.close()
            raise
        self._sums, self._partial = array("Q"), b""
        if marks[0]:
            for block in self._tokens.blocks():
                self._add_sums(block)

    @property
    def num_token_bytes(self) -> int:
        return self._tokens.num_bytes

    def extend(self, tokens: npt.NDArray[Any], rows: Rows) -> None:
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._tokens.append(data)
        self._add_sums(data)
        self._rows.append(rows.tobytes())

    def sync(self) -> tuple[Mark, Mark]:
        return self._tokens.sync(), self._rows.sync()

    def finish(self, *, files: Sequence[str]) -> ShardEntry:
        rows = self._rows.rows(ROW)
        if self._partial:
            self._sums.append(xxhash.xxh3_64_intdigest(self._partial))
        num_tokens = self.num_token_bytes // self._dtype.itemsize
        header = pack_header(token_bytes=self._dtype.itemsize, num_tokens=num_tokens, num_docs=len(rows))
        self._tokens.file.seek(0)
        self._tokens.file.write(header)
        self._tokens.sync()
        self.abandon()
        beside: dict[str, Callable[[], bytes]] = {  # one after the other: together they may be larger than the tokens
            "sum": lambda: np.array(self._sums, dtype="<u8").tobytes(),
            "len": lambda: lengths_file(rows),
            "idx": lambda: index_file(rows),
            "sig": lambda: signatures_file(rows),
            "src.parquet": lambda: origins_file(rows, files=files),
        }
        path = self._base.with_suffix(".tok")
        return ShardEntry(
            name=self._name,
            tokens=num_tokens,
            docs=len(rows),
            bytes=path.stat().st_size,
            sha256=sha256_file(path),
            files={suffix: self._write(suffix, make()) for suffix, make in beside.items()},
        )

    def abandon(self) -> None:
        for spool in (self._tokens, self._rows):
            with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
                spool.close()

    def _write(self, suffix: str, data: bytes) -> FileEntry:
        write_atomic(self._base.with_suffix(f".{suffix}"), data)
        return FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def _add_sums(self, data: bytes) -> None:
        """Checksums of whole blocks; what is left begins the next one."""
        view = memoryview(self._partial + data) if self._partial else memoryview(data)
        whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
        for begin in range(0, whole, BLOCK_BYTES):
            self._sums.append(xxhash.xxh3_64_intdigest(view[begin : begin + BLOCK_BYTES]))
        self._partial = bytes(view[whole:])
