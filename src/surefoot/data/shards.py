"""Shards of tokens, and reading them with every touched block checked at every read.

`NNNNN.tok`  4 KiB header, then raw little-endian u16 or u32 tokens; every document ends in one EOS and none spans two shards
`NNNNN.sum`  xxh3_64 (u64) of each 16 KiB block of token bytes; the last block may be short
`NNNNN.len`  u32 length of each document in tokens, EOS included; zeros up to 8 bytes; u64 first token of every 1,024th document
`NNNNN.src.parquet`  where each document came from; never read in training
"""

from __future__ import annotations

import logging
import operator
import struct
import threading
import time
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as _digest

from surefoot.core.errors import CUT_SHORT, DAMAGED, DAMAGED_HEADER, DataError
from surefoot.data.block_sums import LONGEST_RUN, SUM_BYTES, BlockSums
from surefoot.data.manifest import Manifest, Split, load_manifest
from surefoot.data.quarantine import shard_error, with_shard
from surefoot.data.storage import ByteRange, LocalStorage, Storage, open_storage

logger = logging.getLogger(__name__)

HEADER_BYTES: Final = 4096
BLOCK_BYTES: Final = 16 * 1024
LEN_STRIDE: Final = 1024
_MAGIC: Final = b"SFTOKENS"
_HEADER: Final = struct.Struct("<8sHHIQQ")
_VERSION: Final = 1
_MAX_KEPT_BYTES: Final = 32 << 20  # the checksums of 64 GiB of tokens
_CHECK_LIMIT_S: Final = 10.0  # 28,000 shards take 0.1 s on a local disk, and minutes where each answer takes a network's time
_NUM_CHECKED_AT_ONCE: Final = 256

I64Array = npt.NDArray[np.int64]


def pack_header(*, token_bytes: int, num_tokens: int, num_docs: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, token_bytes, BLOCK_BYTES, num_tokens, num_docs).ljust(HEADER_BYTES, b"\0")


class _Reads(NamedTuple):
    """Neighbouring tokens of one shard each and the whole blocks around them: columns (R,), in the order in which files are best read.

    `skip_bytes` of the blocks stand before the tokens, whose `num_bytes` go to byte `places` of the result. `spans` says who asked.
    """

    shards: I64Array
    first_blocks: I64Array
    num_blocks: I64Array
    skip_bytes: I64Array
    num_bytes: I64Array
    places: I64Array
    spans: I64Array


class TokenStore:
    """The tokens of one source and split as one stream, over all its shards. Several threads may read at once.

    Nothing is opened before it is needed. Reads are copies and not a memory map: the bytes that were checked are the bytes that are
    returned, and a failing disk or a file cut short is an error with a name where a map would kill the process. A block that differs from
    its checksum is fetched once more, past the caches on the way.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        source: str,
        split: Split,
        manifest: Manifest | None = None,
        storage: Storage | None = None,
        max_kept_bytes: int = _MAX_KEPT_BYTES,
    ) -> None:
        """`storage` is shared when it is given, with its open files, and closed by who made it.

        The checksums of a local folder stay in memory once read, if all of them fit into `max_kept_bytes`.
        """
        self.manifest = manifest or load_manifest(path)
        self.entry = self.manifest.split(source, split)
        self.source = source
        self.split = split
        self.num_refetched = 0
        self._owns_storage = storage is None
        self._storage = storage or open_storage(path)
        self._dtype = self.manifest.token_dtype
        self._tokens = np.array([shard.tokens for shard in self.entry.shards], dtype=np.int64)
        self._ends = np.cumsum(self._tokens)
        self._tok_names = [f"{source}/{split}/{shard.name}.tok" for shard in self.entry.shards]
        self._sum_names = [f"{source}/{split}/{shard.name}.sum" for shard in self.entry.shards]
        num_blocks = -(-self._tokens * self._dtype.itemsize // BLOCK_BYTES)
        self._sums = BlockSums(self._storage, self._sum_names, num_blocks, keep=self._keeps_sums(max_kept_bytes))
        self._is_checked = np.zeros(len(self.entry.shards), dtype=np.bool_)
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
            try:
                self._check_sizes(needed[first : first + _NUM_CHECKED_AT_ONCE])
            except DataError as error:
                raise with_shard(error) from error
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
            try:
                self._fill(out.data.cast("B"), self._cut(starts, counts), samples)
            except DataError as error:
                raise with_shard(error) from error
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
        token_bytes, block_tokens = self._dtype.itemsize, BLOCK_BYTES // self._dtype.itemsize
        (spans,) = counts.nonzero()
        starts, counts, places = starts[spans], counts[spans], (counts.cumsum() - counts)[spans]
        pieces = []
        while starts.size:
            shards = self._ends.searchsorted(starts, side="right")
            ends = self._ends[shards]
            first_blocks, skips = np.divmod(starts - ends + self._tokens[shards], block_tokens)
            here = np.minimum(np.minimum(counts, ends - starts), LONGEST_RUN * block_tokens - skips)
            num_blocks = (skips + here + (block_tokens - 1)) // block_tokens
            pieces.append((starts, shards, first_blocks, num_blocks, skips * token_bytes, here * token_bytes, places * token_bytes, spans))
            (left,) = (counts > here).nonzero()
            starts, counts, places, spans = starts[left] + here[left], counts[left] - here[left], places[left] + here[left], spans[left]
        columns = pieces[0] if len(pieces) == 1 else tuple(map(np.concatenate, zip(*pieces, strict=True)))
        order = columns[0].argsort(kind="stable")
        return _Reads(*(column[order] for column in columns[1:]))

    def _fill(self, out: memoryview, reads: _Reads, samples: I64Array | None) -> None:
        """Read, check and put in place. The loop runs once per row of a batch: it makes no array and no record."""
        self._check_first_touch(reads.shards)
        sums, firsts = self._sums.of(reads.shards, reads.first_blocks, reads.num_blocks)
        blocks = self._storage.ranges(self._blocks(reads))
        columns = zip(
            firsts, *(column.tolist() for column in (reads.num_blocks, reads.skip_bytes, reads.num_bytes, reads.places)), strict=True
        )
        for read, (data, (first, count, skip, num_bytes, place)) in enumerate(zip(blocks, columns, strict=True)):
            if (_digest(data) != sums[first]) if count == 1 else not _agree(data, sums[first : first + count]):
                data = self._fetched_again(reads, read, samples)
            out[place : place + num_bytes] = data[skip : skip + num_bytes]

    def _blocks(self, reads: _Reads) -> list[ByteRange]:
        begins = reads.first_blocks * BLOCK_BYTES
        num_bytes = np.minimum(reads.num_blocks * BLOCK_BYTES, self._tokens[reads.shards] * self._dtype.itemsize - begins)
        names = [self._tok_names[shard] for shard in reads.shards.tolist()]
        return list(map(ByteRange, names, (begins + HEADER_BYTES).tolist(), num_bytes.tolist()))

    def _fetched_again(self, reads: _Reads, read: int, samples: I64Array | None) -> memoryview:
        """What a second fetch of blocks and checksums gave. Raises DataError when they differ again."""
        shard, first_block, num_blocks, *_, span = (int(column[read]) for column in reads)
        right = self._sums.again(shard, first_block, num_blocks)
        data = memoryview(self._storage.again(self._blocks(reads)[read]))
        for block, (got, wanted) in enumerate(zip(_digests(data, num_blocks), right, strict=True), start=first_block):
            if got != wanted:
                raise self._mismatch(shard, block, got=got, wanted=wanted, sample=None if samples is None else int(samples[span]))
        with self._lock:
            self.num_refetched += 1
        logger.warning(
            "%s: bytes of block %d on differed from their checksums and were right when fetched again: look at memory, disk and network",
            self._where(shard),
            first_block,
        )
        return data

    def _mismatch(self, number: int, block: int, *, got: int, wanted: int, sample: int | None) -> DataError:
        offset = HEADER_BYTES + block * BLOCK_BYTES
        of_sample = "" if sample is None else f", needed for sample {sample}"
        return shard_error(
            f"block {block} at byte {offset} has checksum {got:016x}, written was {wanted:016x}{of_sample}; fetching it again did not help",
            kind=DAMAGED,
            file=self._tok_names[number],
            where=self._where(number),
            block=block,
            offset=offset,
            got=f"{got:016x}",
            wanted=f"{wanted:016x}",
            sample=sample,
        )

    def _keeps_sums(self, max_kept_bytes: int) -> bool:
        """All checksums of the folder or none: in a random order over more than fits, what is kept is not what is asked for next."""
        tokens = sum(split.tokens for source in self.manifest.sources.values() for split in source.splits.values())
        num_bytes = tokens * self._dtype.itemsize // BLOCK_BYTES * SUM_BYTES
        return isinstance(self._storage, LocalStorage) and num_bytes <= max_kept_bytes

    def _check_first_touch(self, shards: I64Array) -> None:
        """Size and header of shards from which nothing was read yet."""
        unchecked = shards[~self._is_checked[shards]]
        if not unchecked.size:
            return
        fresh = np.unique(unchecked).tolist()
        self._check_sizes(fresh)
        wanted = [ByteRange(self._tok_names[number], 0, HEADER_BYTES) for number in fresh]
        for number, one, header in zip(fresh, wanted, self._storage.ranges(wanted), strict=True):
            entry = self.entry.shards[number]
            right = pack_header(token_bytes=self._dtype.itemsize, num_tokens=entry.tokens, num_docs=entry.docs)
            if header != right and self._storage.again(one) != right:
                what = "the header is not that of the manifest"
                raise shard_error(what, kind=DAMAGED_HEADER, file=one.name, where=self._where(number))
            self._is_checked[number] = True

    def _check_sizes(self, shards: Iterable[int]) -> None:
        numbers = list(shards)
        sizes = self._storage.num_bytes([names[number] for number in numbers for names in (self._tok_names, self._sum_names)])
        for number, got_tok, got_sum in zip(numbers, sizes[::2], sizes[1::2], strict=True):
            for what, got, want in (
                ("file size", got_tok, HEADER_BYTES + self.entry.shards[number].tokens * self._dtype.itemsize),
                ("size of the checksum file", got_sum, self._sums.num_bytes(number)),
            ):
                if got != want:
                    message, file = f"{what} is {got}, the manifest says {want}", self._tok_names[number]
                    raise shard_error(message, kind=CUT_SHORT, file=file, where=self._where(number), got=got, wanted=want)

    def _where(self, number: int) -> str:
        return f"{self._storage.place}/{self._tok_names[number]}"


def _agree(data: memoryview, sums: Sequence[int]) -> bool:
    return all(map(operator.eq, _digests(data, len(sums)), sums))


def _digests(data: memoryview, num_blocks: int) -> list[int]:
    return [_digest(data[begin : begin + BLOCK_BYTES]) for begin in range(0, num_blocks * BLOCK_BYTES, BLOCK_BYTES)]
