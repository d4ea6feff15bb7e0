"""Shards of tokens, format 1, and reading them with every touched block checked.

`NNNNN.tok`  4 KiB header, then raw little-endian u16 or u32 tokens; every document ends in one EOS and none spans two shards
`NNNNN.sum`  xxh3_64 (u64) of each 16 KiB block of token bytes; the last block may be short
`NNNNN.len`  u32 length of each document in tokens, EOS included; zeros up to 8 bytes; u64 first token of every 1,024th document
`NNNNN.src.parquet`  where each document came from; never read in training
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from surefoot.core.errors import DataError
from surefoot.data.manifest import Manifest, ShardEntry, Split, load_manifest

HEADER_BYTES: Final = 4096
BLOCK_BYTES: Final = 16 * 1024
LEN_STRIDE: Final = 1024
_MAGIC: Final = b"SFTOKENS"
_HEADER: Final = struct.Struct("<8sHHIQQ")
_VERSION: Final = 1
_MAX_OPEN_SHARDS: Final = 64  # a store of 30 TB has 28,000; file descriptors are bounded


def pack_header(*, token_bytes: int, num_tokens: int, num_docs: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, token_bytes, BLOCK_BYTES, num_tokens, num_docs).ljust(HEADER_BYTES, b"\0")


class TokenStore:
    """The tokens of one source and split as one stream, over all its shards.

    Reads go through `pread` and not through a memory map: the bytes that were checked are the bytes that are returned, and a failing
    disk or a file cut short is an error with a name where a map would kill the process. Files are opened relative to the folder as it
    was when the store was made, so data that is replaced meanwhile is never mixed in.
    """

    def __init__(self, path: str | Path, *, source: str, split: Split, manifest: Manifest | None = None) -> None:
        self.manifest = manifest or load_manifest(path)
        self.entry = self.manifest.split(source, split)
        self._folder = Path(path) / source / split
        self._token_bytes = self.manifest.token_dtype.itemsize
        self._ends = list(accumulate(shard.tokens for shard in self.entry.shards))
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._folder_fd = -1
        if self.entry.shards:
            try:
                self._folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                raise DataError(
                    f"cannot open the shards: {error.strerror}", where=str(self._folder), hint="prepare the data again with --force"
                ) from error

    @property
    def num_tokens(self) -> int:
        return self.entry.tokens

    def check_files(self) -> None:
        """Open every shard once: raises DataError for the first that is missing, cut short, or not the one of the manifest."""
        for number in range(len(self.entry.shards)):
            self._shard(number)

    def read(self, start: int, count: int, *, sample: int | None = None) -> npt.NDArray[Any]:
        """Tokens [start, start + count) of the stream in their stored dtype.

        Raises DataError when a touched block differs from its checksum; `sample` is only for its message. ValueError outside the stream.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise ValueError(f"tokens {start}..{start + count} outside a stream of {self.num_tokens}")
        parts = []
        while count:
            number = bisect_right(self._ends, start)
            first_of_shard = self._ends[number] - self.entry.shards[number].tokens
            here = min(count, self._ends[number] - start)
            parts.append(self._shard(number).read(start - first_of_shard, here, sample=sample))
            start, count = start + here, count - here
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.manifest.token_dtype)

    def document_starts(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Positions in [start, start + count) of the stream at which a document begins: the first, and each that follows an EOS."""
        before = 1 if start > 0 else 0
        tokens = self.read(start - before, max(0, count - 1 + before))
        starts = np.flatnonzero(tokens == self.manifest.tokenizer.eos_id).astype(np.int64) + start - before + 1
        return starts if before or not count else np.concatenate([np.zeros(1, dtype=np.int64), starts])

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    def _shard(self, number: int) -> _OpenShard:
        shard = self._open.pop(number, None)
        if shard is None:
            if len(self._open) >= _MAX_OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
            shard = _OpenShard(self.entry.shards[number], folder=self._folder, folder_fd=self._folder_fd, dtype=self.manifest.token_dtype)
        self._open[number] = shard
        return shard


class _OpenShard:
    """One open `.tok` file and its checksums."""

    def __init__(self, entry: ShardEntry, *, folder: Path, folder_fd: int, dtype: np.dtype[Any]) -> None:
        self._path = folder / f"{entry.name}.tok"
        self._dtype = dtype
        self._num_token_bytes = entry.tokens * dtype.itemsize
        try:
            sum_fd = os.open(f"{entry.name}.sum", os.O_RDONLY, dir_fd=folder_fd)
            with open(sum_fd, "rb") as file:
                self._sums = np.frombuffer(file.read(), dtype="<u8")
            self._fd = os.open(f"{entry.name}.tok", os.O_RDONLY, dir_fd=folder_fd)
        except OSError as error:
            raise DataError(
                f"cannot open {error.filename}: {error.strerror}", where=str(self._path), hint="prepare the data again with --force"
            ) from error
        except ValueError as error:
            raise DataError(
                "the checksum file is cut short", where=str(self._path.with_suffix(".sum")), hint="prepare the data again with --force"
            ) from error
        try:
            self._check(entry)
        except DataError:
            os.close(self._fd)
            raise

    def _check(self, entry: ShardEntry) -> None:
        size = os.fstat(self._fd).st_size
        header = os.pread(self._fd, HEADER_BYTES, 0)
        wanted = pack_header(token_bytes=self._dtype.itemsize, num_tokens=entry.tokens, num_docs=entry.docs)
        num_blocks = -(-self._num_token_bytes // BLOCK_BYTES)
        for what, got, want in (
            ("file size", size, HEADER_BYTES + self._num_token_bytes),
            ("number of block checksums", self._sums.size, num_blocks),
        ):
            if got != want:
                raise DataError(
                    f"{what} is {got}, the manifest says {want}",
                    where=str(self._path),
                    hint="the shard was cut short or replaced: restore it, or prepare the data again with --force",
                    got=got,
                    wanted=want,
                )
        if header != wanted:
            raise DataError(
                "the header is not that of the manifest",
                where=str(self._path),
                hint="restore the shard, or prepare the data again with --force",
            )

    def read(self, first_token: int, count: int, *, sample: int | None) -> npt.NDArray[Any]:
        first_byte, end_byte = first_token * self._dtype.itemsize, (first_token + count) * self._dtype.itemsize
        first_block, end_block = first_byte // BLOCK_BYTES, -(-end_byte // BLOCK_BYTES)
        begin = first_block * BLOCK_BYTES
        size = min(end_block * BLOCK_BYTES, self._num_token_bytes) - begin
        try:
            data = os.pread(self._fd, size, HEADER_BYTES + begin)
        except OSError as error:
            raise DataError(f"reading failed: {error.strerror}", where=str(self._path), hint="check the disk") from error
        view = memoryview(data)
        for block in range(first_block, end_block):
            checked = view[block * BLOCK_BYTES - begin : (block + 1) * BLOCK_BYTES - begin]
            digest = xxhash.xxh3_64_intdigest(checked)
            if digest != int(self._sums[block]):
                raise self._mismatch(block, got=digest, wanted=int(self._sums[block]), sample=sample)
        return np.frombuffer(data, dtype=self._dtype, count=count, offset=first_byte - begin)

    def _mismatch(self, block: int, *, got: int, wanted: int, sample: int | None) -> DataError:
        offset = HEADER_BYTES + block * BLOCK_BYTES
        of_sample = "" if sample is None else f", needed for sample {sample}"
        return DataError(
            f"block {block} at byte {offset} has checksum {got:016x}, written was {wanted:016x}{of_sample}",
            where=str(self._path),
            hint="the bytes on disk changed: restore the shard from a copy, or prepare the data again with --force",
            shard=self._path.name,
            block=block,
            offset=offset,
            got=f"{got:016x}",
            wanted=f"{wanted:016x}",
            sample=sample,
        )

    def close(self) -> None:
        os.close(self._fd)
