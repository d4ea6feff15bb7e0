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
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from surefoot.core.errors import DataError
from surefoot.data.manifest import Manifest, Split, load_manifest
from surefoot.data.quarantine import DAMAGED_BLOCK
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


class _Read(NamedTuple):
    """Neighbouring tokens of one shard and the whole blocks around them. Sorted, reads come in the order in which files are best read.

    `skip_bytes` of the blocks stand before the tokens, whose `num_bytes` go to byte `place` of the result.
    """

    shard: int
    first_block: int
    num_blocks: int
    skip_bytes: int
    num_bytes: int
    place: int
    sample: int | None


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
        self._ends = list(accumulate(shard.tokens for shard in self.entry.shards))
        self._tok_names = [f"{source}/{split}/{shard.name}.tok" for shard in self.entry.shards]
        self._sum_names = [f"{source}/{split}/{shard.name}.sum" for shard in self.entry.shards]
        self._is_checked = bytearray(len(self.entry.shards))
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        return self.entry.tokens

    def check_files(self, *, limit_s: float = _CHECK_LIMIT_S, leave_out: Container[str] = ()) -> int:
        """Compare the sizes of all shards with the manifest, in their order, for as long as `limit_s`; how many were looked at.

        `leave_out` names shards that no sample needs any more. Raises DataError for the first of the others that is missing or of another
        size. What time did not suffice for, and every header, is checked when first touched.
        """
        give_up_s = time.monotonic() + limit_s
        needed = [number for number, shard in enumerate(self.entry.shards) if shard.name not in leave_out]
        for first in range(0, len(needed), _NUM_CHECKED_AT_ONCE):
            if time.monotonic() > give_up_s:
                logger.warning("%d of %d shards were looked at in %g s: the rest when they are read", first, len(needed), limit_s)
                return first
            self._check_sizes(needed[first : first + _NUM_CHECKED_AT_ONCE])
        return len(needed)

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
            of_samples = [None] * len(starts) if samples is None else samples.tolist()
            self._fill(out.data.cast("B"), sorted(self._cut(starts.tolist(), counts.tolist(), of_samples)))
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

    def _cut(self, starts: list[int], counts: list[int], samples: list[int | None]) -> Iterator[_Read]:
        """The spans cut at the ends of shards, and where a read would become too long."""
        token_bytes, block_tokens = self._dtype.itemsize, BLOCK_BYTES // self._dtype.itemsize
        place = 0
        for start, count, sample in zip(starts, counts, samples, strict=True):
            while count:
                shard = bisect_right(self._ends, start)
                end_of_shard = self._ends[shard]
                first = start - end_of_shard + self.entry.shards[shard].tokens
                first_block, skip = divmod(first, block_tokens)
                here = min(count, end_of_shard - start, _MAX_BLOCKS_AT_ONCE * block_tokens - skip)
                num_blocks = -(-(skip + here) // block_tokens)
                yield _Read(shard, first_block, num_blocks, skip * token_bytes, here * token_bytes, place, sample)
                start, count, place = start + here, count - here, place + here * token_bytes

    def _fill(self, out: memoryview, reads: list[_Read]) -> None:
        """Read, check and put in place. The loop runs once per row of a batch: it makes no array and no record."""
        self._check_first_touch({read.shard for read in reads})
        sums = self._sums(reads)
        wanted = [self._blocks(read) for read in reads]
        checked = 0
        for read, data in zip(reads, self._storage.ranges(wanted), strict=True):
            _, _, num_blocks, skip_bytes, num_bytes, place, _ = read
            right = sums[checked : checked + num_blocks]
            checked += num_blocks
            if _digests(data, num_blocks=num_blocks) != right:
                data = self._fetched_again(read)
            out[place : place + num_bytes] = data[skip_bytes : skip_bytes + num_bytes]

    def _sums(self, reads: list[_Read]) -> list[int]:
        """The checksums of all touched blocks, read by read."""
        names = self._sum_names
        wanted = [ByteRange(names[shard], first * _SUM_BYTES, count * _SUM_BYTES) for shard, first, count, *_ in reads]
        words = self._storage.joined(wanted)
        if len(words) != sum(one.num_bytes for one in wanted):
            return [word for read in reads for word in self._sums_again(read)]
        sums: list[int] = np.frombuffer(words, dtype="<u8").tolist()
        return sums

    def _sums_again(self, read: _Read) -> list[int]:
        """The checksums of one read, past the caches on the way."""
        name = self._sum_names[read.shard]
        words = self._storage.again(ByteRange(name, read.first_block * _SUM_BYTES, read.num_blocks * _SUM_BYTES))
        if len(words) != read.num_blocks * _SUM_BYTES:
            raise DataError("the checksum file is cut short", where=f"{self._storage.place}/{name}", hint=_REPLACED)
        sums: list[int] = np.frombuffer(words, dtype="<u8").tolist()
        return sums

    def _blocks(self, read: _Read) -> ByteRange:
        begin = read.first_block * BLOCK_BYTES
        num_bytes = min(read.num_blocks * BLOCK_BYTES, self._num_token_bytes(read.shard) - begin)
        return ByteRange(self._tok_names[read.shard], HEADER_BYTES + begin, num_bytes)

    def _fetched_again(self, read: _Read) -> memoryview:
        """What a second fetch of blocks and checksums gave. Raises DataError when they differ again."""
        right = self._sums_again(read)
        data = memoryview(self._storage.again(self._blocks(read)))
        for block, (got, wanted) in enumerate(zip(_digests(data, num_blocks=len(right)), right, strict=True), start=read.first_block):
            if got != wanted:
                raise self._mismatch(read.shard, block, got=got, wanted=wanted, sample=read.sample)
        with self._lock:
            self.num_refetched += 1
        logger.warning(
            "%s: bytes of block %d on differed from their checksums and were right when fetched again: look at memory, disk and network",
            self._where(read.shard),
            read.first_block,
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
            kind=DAMAGED_BLOCK,
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
        headers = self._storage.ranges([ByteRange(self._tok_names[number], 0, HEADER_BYTES) for number in fresh])
        for number, header in zip(fresh, headers, strict=True):
            entry = self.entry.shards[number]
            if header != pack_header(token_bytes=self._dtype.itemsize, num_tokens=entry.tokens, num_docs=entry.docs):
                hint = "restore the shard, or prepare the data again with --force"
                raise DataError("the header is not that of the manifest", where=self._where(number), hint=hint)
            self._is_checked[number] = 1

    def _check_sizes(self, shards: Iterable[int]) -> None:
        numbers = list(shards)
        sizes = self._storage.num_bytes([names[number] for number in numbers for names in (self._tok_names, self._sum_names)])
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

    def _num_token_bytes(self, number: int) -> int:
        return self.entry.shards[number].tokens * self._dtype.itemsize

    def _where(self, number: int) -> str:
        return f"{self._storage.place}/{self._tok_names[number]}"


def _digests(data: memoryview, *, num_blocks: int) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    return [digest(data[begin : begin + BLOCK_BYTES]) for begin in range(0, num_blocks * BLOCK_BYTES, BLOCK_BYTES)]
