"""Shards of tokens, and reading them with every touched block checked at every read.

`NNNNN.tok`  4 KiB header, then raw little-endian u16 or u32 tokens; every document ends in one EOS and none spans two shards
`NNNNN.sum`  xxh3_64 (u64) of each 16 KiB block of token bytes; the last block may be short
`NNNNN.len`  u32 length of each document in tokens, EOS included; zeros up to 8 bytes; u64 first token of every 1,024th document
`NNNNN.src.parquet`  where each document came from; never read in training
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from surefoot.core.errors import DataError
from surefoot.data.manifest import Manifest, Split, load_manifest
from surefoot.data.storage import ByteRange, Storage, open_storage

logger = logging.getLogger(__name__)

HEADER_BYTES: Final = 4096
BLOCK_BYTES: Final = 16 * 1024
LEN_STRIDE: Final = 1024
_SUM_BYTES: Final = 8
_MAX_BLOCKS_AT_ONCE: Final = 64  # 1 MiB: what one read of a long span holds beside its result
_MAGIC: Final = b"SFTOKENS"
_HEADER: Final = struct.Struct("<8sHHIQQ")
_VERSION: Final = 1
_CHECK_LIMIT_S: Final = 10.0  # 28,000 shards take 0.1 s on a local disk, and minutes where each answer takes a network's time
_NUM_CHECKED_AT_ONCE: Final = 256
_REPLACED: Final = "the shard was cut short or replaced: restore it, or prepare the data again with --force"

I64Array = npt.NDArray[np.int64]


def pack_header(*, token_bytes: int, num_tokens: int, num_docs: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, token_bytes, BLOCK_BYTES, num_tokens, num_docs).ljust(HEADER_BYTES, b"\0")


class _Reads(NamedTuple):
    """Reads of neighbouring tokens of one shard, in the order in which files are best read: columns of one length.

    `first` counts from the start of the shard, `place` from the start of the result; `span` is which of the spans asked for it is of.
    """

    shard: I64Array
    first: I64Array
    count: I64Array
    place: I64Array
    span: I64Array


class TokenStore:
    """The tokens of one source and split as one stream, over all its shards. Several threads may read at once.

    Nothing is opened before it is needed, and no more than the touched checksums is read of a shard's `.sum`. Reads are copies and not a
    memory map: the bytes that were checked are the bytes that are returned, and a failing disk or a file cut short is an error with a
    name where a map would kill the process. A block that differs from its checksum is fetched once more, past the caches on the way.
    """

    def __init__(
        self, path: str | Path, *, source: str, split: Split, manifest: Manifest | None = None, storage: Storage | None = None
    ) -> None:
        """`storage` is shared when it is given, with its open files, and closed by who made it."""
        self.manifest = manifest or load_manifest(path)
        self.entry = self.manifest.split(source, split)
        self.source = source
        self.split = split
        self.num_refetched = 0
        self._owns_storage = storage is None
        self._storage = storage or open_storage(path)
        self._dtype = self.manifest.token_dtype
        self._block_tokens = BLOCK_BYTES // self._dtype.itemsize
        self._shard_tokens = np.array([shard.tokens for shard in self.entry.shards], dtype=np.int64)
        self._ends = np.cumsum(self._shard_tokens)
        self._is_checked = bytearray(len(self.entry.shards))
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        return self.entry.tokens

    def check_files(self, *, limit_s: float = _CHECK_LIMIT_S) -> int:
        """Compare the sizes of all shards with the manifest, in their order, for as long as `limit_s`; how many were looked at.

        Raises DataError for the first that is missing or of another size. The others, and every header, are checked when first touched.
        """
        give_up_s = time.monotonic() + limit_s
        num_shards = len(self.entry.shards)
        for first in range(0, num_shards, _NUM_CHECKED_AT_ONCE):
            if time.monotonic() > give_up_s:
                logger.warning("%d of %d shards were looked at in %g s: the rest when they are read", first, num_shards, limit_s)
                return first
            self._check_sizes(range(first, min(first + _NUM_CHECKED_AT_ONCE, num_shards)))
        return num_shards

    def read(self, start: int, count: int, *, sample: int | None = None) -> npt.NDArray[Any]:
        """Tokens [start, start + count) of the stream in their stored dtype.

        Raises DataError when a touched block differs from its checksum; `sample` is only for its message. ValueError outside the stream.
        """
        samples = None if sample is None else np.array([sample])
        return self.read_spans(np.array([start]), np.array([count]), samples=samples)

    def read_rows(self, starts: I64Array, row_tokens: int, *, samples: I64Array | None = None) -> npt.NDArray[Any]:
        """Tokens [start, start + row_tokens) for each of `starts`, shape (B, row_tokens); raises what `read` raises.

        `samples` (B,) are the global samples that messages name.
        """
        counts = np.full(len(starts), row_tokens, dtype=np.int64)
        return self.read_spans(starts, counts, samples=samples).reshape(len(starts), row_tokens)

    def read_spans(self, starts: I64Array, counts: I64Array, *, samples: I64Array | None = None) -> npt.NDArray[Any]:
        """The tokens of all spans behind each other, read shard by shard; raises what `read` raises."""
        if starts.size and (int(starts.min()) < 0 or int(counts.min()) < 0 or int((starts + counts).max()) > self.num_tokens):
            wrong = int(np.flatnonzero((starts < 0) | (counts < 0) | (starts + counts > self.num_tokens))[0])
            raise ValueError(f"tokens {starts[wrong]}..{starts[wrong] + counts[wrong]} outside a stream of {self.num_tokens}")
        out = np.empty(int(counts.sum()), dtype=self._dtype)
        if out.size:
            self._fill(memoryview(out).cast("B"), self._cut(starts, counts), samples=samples)
        return out

    def document_starts(self, start: int, count: int) -> I64Array:
        """Positions in [start, start + count) of the stream at which a document begins: the first, and each that follows an EOS."""
        before = 1 if start > 0 else 0
        tokens = self.read(start - before, max(0, count - 1 + before))
        starts = np.flatnonzero(tokens == self.manifest.tokenizer.eos_id).astype(np.int64) + start - before + 1
        return starts if before or not count else np.concatenate([np.zeros(1, dtype=np.int64), starts])

    def close(self) -> None:
        if self._owns_storage:
            self._storage.close()

    def _cut(self, starts: I64Array, counts: I64Array) -> _Reads:
        """The spans cut at the ends of shards, and where a read would become too long."""
        parts: list[tuple[I64Array, ...]] = []
        span = np.flatnonzero(counts)
        start, count, place = starts[span], counts[span], (np.cumsum(counts) - counts)[span]
        longest = _MAX_BLOCKS_AT_ONCE * self._block_tokens
        while span.size:
            shard = np.searchsorted(self._ends, start, side="right")
            first = start - self._ends[shard] + self._shard_tokens[shard]
            limit = np.minimum(self._shard_tokens[shard], first // self._block_tokens * self._block_tokens + longest)
            here = np.minimum(count, limit - first)
            parts.append((shard, first, here, place, span))
            left = np.flatnonzero(here < count)
            span, start, count, place = span[left], (start + here)[left], (count - here)[left], (place + here)[left]
        columns = parts[0] if len(parts) == 1 else tuple(np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((columns[1], columns[0]))
        return _Reads(*(column[order] for column in columns))

    def _fill(self, out: memoryview, reads: _Reads, *, samples: I64Array | None) -> None:
        """Read, check and put in place. The loop runs once per row of a batch: it makes no array and no record."""
        token_bytes = self._dtype.itemsize
        shards = reads.shard.tolist()
        self._check_first_touch(set(shards))
        first_block = reads.first // self._block_tokens
        num_blocks = -(-(reads.first + reads.count) // self._block_tokens) - first_block
        sums = self._sums(shards, first_block, num_blocks)
        begin = first_block * BLOCK_BYTES
        size = np.minimum(num_blocks * BLOCK_BYTES, self._shard_tokens[reads.shard] * token_bytes - begin)
        wanted = list(map(ByteRange, self._names(shards, "tok"), (HEADER_BYTES + begin).tolist(), size.tolist()))
        skips, sizes = (reads.first * token_bytes - begin).tolist(), (reads.count * token_bytes).tolist()
        places = (reads.place * token_bytes).tolist()
        checked = 0
        for read, (data, count, skip, num_bytes, place) in enumerate(
            zip(self._storage.ranges(wanted), num_blocks.tolist(), skips, sizes, places, strict=True)
        ):
            right = sums[checked : checked + count]
            checked += count
            if _digests(data, num_blocks=count) != right:
                sample = None if samples is None else int(samples[reads.span[read]])
                data = self._fetched_again(wanted[read], shards[read], right=right, sample=sample)
            out[place : place + num_bytes] = data[skip : skip + num_bytes]

    def _sums(self, shards: list[int], first_block: I64Array, num_blocks: I64Array) -> list[int]:
        """The checksums of all touched blocks, read by read."""
        names = self._names(shards, "sum")
        wanted = list(map(ByteRange, names, (first_block * _SUM_BYTES).tolist(), (num_blocks * _SUM_BYTES).tolist()))
        words = self._storage.joined(wanted)
        if len(words) != int(num_blocks.sum()) * _SUM_BYTES:
            words = b"".join(map(self._storage.again, wanted))
        if len(words) != int(num_blocks.sum()) * _SUM_BYTES:
            raise DataError("a checksum file is cut short", where=f"{self._storage.place}/{wanted[0].name}", hint=_REPLACED)
        sums: list[int] = np.frombuffer(words, dtype="<u8").tolist()
        return sums

    def _fetched_again(self, wanted: ByteRange, number: int, *, right: list[int], sample: int | None) -> memoryview:
        """What a second fetch gave, past the caches on the way. Raises DataError when it differs from its checksums, too."""
        data = memoryview(self._storage.again(wanted))
        first_block = (wanted.offset - HEADER_BYTES) // BLOCK_BYTES
        for block, (got, want) in enumerate(zip(_digests(data, num_blocks=len(right)), right, strict=True), start=first_block):
            if got != want:
                raise self._mismatch(number, block, got=got, wanted=want, sample=sample)
        with self._lock:
            self.num_refetched += 1
        logger.warning(
            "%s: bytes of block %d on differed from their checksums and were right when fetched again: look at memory, disk and network",
            self._where(number),
            first_block,
        )
        return data

    def _mismatch(self, number: int, block: int, *, got: int, wanted: int, sample: int | None) -> DataError:
        offset = HEADER_BYTES + block * BLOCK_BYTES
        shard = f"{self.source}/{self.entry.shards[number].name}"
        of_sample = "" if sample is None else f", needed for sample {sample}"
        return DataError(
            f"block {block} at byte {offset} has checksum {got:016x}, written was {wanted:016x}{of_sample}; fetching it again did not help",
            where=self._where(number),
            hint=f"the stored bytes changed: restore the shard from a copy, or leave it out with `surefoot data block RUN --shard {shard}`",
            kind="damaged-block",
            source=self.source,
            split=self.split,
            shard=shard,
            block=block,
            offset=offset,
            got=f"{got:016x}",
            wanted=f"{wanted:016x}",
            sample=sample,
        )

    def _check_first_touch(self, shards: Iterable[int]) -> None:
        """Size and header of shards from which nothing was read yet."""
        fresh = sorted(number for number in shards if not self._is_checked[number])
        if not fresh:
            return
        self._check_sizes(fresh)
        headers = self._storage.ranges([ByteRange(self._name(number, "tok"), 0, HEADER_BYTES) for number in fresh])
        for number, header in zip(fresh, headers, strict=True):
            entry = self.entry.shards[number]
            if header != pack_header(token_bytes=self._dtype.itemsize, num_tokens=entry.tokens, num_docs=entry.docs):
                hint = "restore the shard, or prepare the data again with --force"
                raise DataError("the header is not that of the manifest", where=self._where(number), hint=hint)
            self._is_checked[number] = 1

    def _check_sizes(self, shards: Iterable[int]) -> None:
        numbers = list(shards)
        sizes = self._storage.num_bytes([self._name(number, kind) for number in numbers for kind in ("tok", "sum")])
        for number, got_tok, got_sum in zip(numbers, sizes[::2], sizes[1::2], strict=True):
            num_token_bytes = self._num_token_bytes(number)
            num_blocks = -(-num_token_bytes // BLOCK_BYTES)
            for what, got, want in (
                ("file size", got_tok, HEADER_BYTES + num_token_bytes),
                ("size of the checksum file", got_sum, num_blocks * _SUM_BYTES),
            ):
                if got != want:
                    raise DataError(
                        f"{what} is {got}, the manifest says {want}", where=self._where(number), hint=_REPLACED, got=got, wanted=want
                    )

    def _names(self, shards: Iterable[int], kind: str) -> list[str]:
        return [self._name(number, kind) for number in shards]

    def _num_token_bytes(self, number: int) -> int:
        return self.entry.shards[number].tokens * self._dtype.itemsize

    def _name(self, number: int, kind: str) -> str:
        return f"{self.source}/{self.split}/{self.entry.shards[number].name}.{kind}"

    def _where(self, number: int) -> str:
        return f"{self._storage.place}/{self._name(number, 'tok')}"


def _digests(data: memoryview, *, num_blocks: int) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    return [digest(data[begin : begin + BLOCK_BYTES]) for begin in range(0, num_blocks * BLOCK_BYTES, BLOCK_BYTES)]
