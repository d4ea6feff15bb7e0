"""The checksums of the blocks of shards: no more is read of a `.sum` than is asked for, and what was read is kept where all of it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import CUT_SHORT, DataError
from surefoot.data.storage import ByteRange, Storage

SUM_BYTES: Final = 8
LONGEST_RUN: Final = 64  # 1 MiB of tokens: what one read of a long span holds beside its result
_KEPT_AT_ONCE: Final = 8192  # checksums, 64 KiB: a first touch costs one read of the device, whether of 8 bytes or of this

I64Array = npt.NDArray[np.int64]


class BlockSums:
    """xxh3_64 of each block of some shards, as their `.sum` files `names` tell it. Several threads may ask at once."""

    def __init__(self, storage: Storage, names: Sequence[str], num_blocks: I64Array, *, keep: bool) -> None:
        """`num_blocks` (shards,). With `keep` the checksums that were read stay in memory, 8 bytes each."""
        self._storage = storage
        self._names = names
        self._num_blocks = num_blocks
        self._keep = keep
        self._firsts = np.cumsum(num_blocks) - num_blocks
        num_stretches = -(-num_blocks // _KEPT_AT_ONCE)
        self._first_stretches = np.cumsum(num_stretches) - num_stretches
        self._kept = np.empty(int(num_blocks.sum()) if keep else 0, dtype="<u8")
        self._is_kept = np.zeros(int(num_stretches.sum()) if keep else 0, dtype=np.bool_)

    def num_bytes(self, shard: int) -> int:
        """What the file of `shard` should have."""
        return int(self._num_blocks[shard]) * SUM_BYTES

    def of(self, shards: I64Array, first_blocks: I64Array, num_blocks: I64Array) -> tuple[Sequence[int], list[int]]:
        """(checksums, where those of each run begin) for runs of blocks, arrays (R,), of at most `LONGEST_RUN` each."""
        if self._keep and self._has_kept(self._first_stretches[shards] + first_blocks // _KEPT_AT_ONCE):
            return self._kept.data, (self._firsts[shards] + first_blocks).tolist()
        sums = self._read(shards.tolist(), first_blocks.tolist(), num_blocks.tolist())
        return sums, (np.cumsum(num_blocks) - num_blocks).tolist()

    def again(self, shard: int, first_block: int, num_blocks: int) -> list[int]:
        """The checksums of one run, past the caches on the way and what was kept."""
        name = self._names[shard]
        words = self._storage.again(ByteRange(name, first_block * SUM_BYTES, num_blocks * SUM_BYTES))
        if len(words) != num_blocks * SUM_BYTES:
            raise DataError("the checksum file is cut short", where=f"{self._storage.place}/{name}", kind=CUT_SHORT, file=name)
        array = np.frombuffer(words, dtype="<u8")
        if self._keep:
            first = int(self._firsts[shard]) + first_block
            self._kept[first : first + num_blocks] = array
        sums: list[int] = array.tolist()
        return sums

    def _has_kept(self, stretches: I64Array) -> bool:
        """Whether the runs that begin in `stretches` are kept, as they are once those were read; not where a file comes short."""
        is_kept = self._is_kept[stretches]
        if is_kept.all():
            return True
        missing = np.unique(stretches[~is_kept])
        self._read_stretches(missing)
        return bool(self._is_kept[missing].all())

    def _read_stretches(self, stretches: I64Array) -> None:
        shards = np.searchsorted(self._first_stretches, stretches, side="right") - 1
        first_blocks = (stretches - self._first_stretches[shards]) * _KEPT_AT_ONCE
        num_blocks = np.minimum(_KEPT_AT_ONCE + LONGEST_RUN, self._num_blocks[shards] - first_blocks)
        wanted = self._ranges(shards.tolist(), first_blocks.tolist(), num_blocks.tolist())
        firsts = (self._firsts[shards] + first_blocks).tolist()
        for stretch, first, one, words in zip(stretches.tolist(), firsts, wanted, self._storage.ranges(wanted), strict=True):
            if len(words) == one.num_bytes:
                self._kept[first : first + one.num_bytes // SUM_BYTES] = np.frombuffer(words, dtype="<u8")
                self._is_kept[stretch] = True

    def _read(self, shards: list[int], first_blocks: list[int], num_blocks: list[int]) -> list[int]:
        wanted = self._ranges(shards, first_blocks, num_blocks)
        words = self._storage.joined(wanted)
        if len(words) != sum(one.num_bytes for one in wanted):
            return [word for run in zip(shards, first_blocks, num_blocks, strict=True) for word in self.again(*run)]
        sums: list[int] = np.frombuffer(words, dtype="<u8").tolist()
        return sums

    def _ranges(self, shards: list[int], first_blocks: list[int], num_blocks: list[int]) -> list[ByteRange]:
        return [
            ByteRange(self._names[shard], first * SUM_BYTES, count * SUM_BYTES)
            for shard, first, count in zip(shards, first_blocks, num_blocks, strict=True)
        ]
