"""Whether the files beside a shard say what its tokens and its manifest say: nothing else sees a bit that flipped in them.

Two ways. Each answer is compared with what else tells the same, for some KiB: tokens have checksums of their own. And a whole file is
compared with its hash in the manifest, where few are asked about.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from surefoot.data.manifest import FileEntry
from surefoot.data.shards import TokenStore
from surefoot.data.side_files import SideFile, documents_by_hash
from surefoot.data.storage import ByteRange, Storage

I64Array = npt.NDArray[np.int64]

KEY_BYTES: Final = 8
_LOOK_TOKENS: Final = 1 << 20
"""Of each end of a document so many tokens are looked at: all of it, but for documents of several megabytes."""
_PIECE_BYTES: Final = 4 << 20


def check_bounds(store: TokenStore, bounds: I64Array, *, shard_start: int, paddings: Sequence[int], file: SideFile) -> None:
    """Raises DataError unless tokens say that documents lie between neighbours of `bounds`, positions in the stream of `store`.

    A document begins behind an EOS or at `shard_start`, ends with its EOS, and has no other; `paddings` have nothing else.
    What `store` raises goes through.
    """
    eos_id = store.manifest.tokenizer.eos_id
    for begin, end in _looked_at(bounds, shard_start=shard_start):
        should = np.zeros(end - begin, dtype=np.bool_)
        ends = bounds[(bounds > begin) & (bounds <= end)]
        should[ends - 1 - begin] = True
        for document in paddings:
            should[max(0, int(bounds[document]) - begin) : max(0, int(bounds[document + 1]) - begin)] = True
        wrong = np.flatnonzero((store.read(begin, end - begin) == eos_id) != should)
        if wrong.size:
            token = begin + int(wrong[0])
            says, is_so = ("a document ends", "none does") if should[wrong[0]] else ("no document ends", "one does")
            raise file.damaged(f"it says that {says} with token {token - shard_start} of the shard, and by the tokens {is_so}")


def check_hashes(storage: Storage, hashes: Sequence[bytes], *, first_doc: int, num_docs: int, index: SideFile, origins: SideFile) -> None:
    """Raises DataError unless `index` has each of `hashes`, those of the documents from `first_doc` on by `origins`, for its document."""
    keys = sorted((int.from_bytes(digest[:KEY_BYTES], "big"), first_doc + place) for place, digest in enumerate(hashes))
    found = documents_by_hash(storage, [(index.name, num_docs)] * len(keys), keys=[(key, key) for key, _ in keys])
    for (key, number), numbers in zip(keys, found, strict=True):
        if number not in numbers:
            raise origins.damaged(f"the hash of document {number} of the shard begins with {key:016x} here, and not in {index.name}")


def check_file(storage: Storage, name: str, entry: FileEntry) -> None:
    """Raises DataError unless the file `name` is what the manifest says, to the last bit. Reads all of it."""
    file = SideFile(storage, name)
    (num_bytes,) = storage.num_bytes([name])
    if num_bytes != entry.bytes:
        raise file.damaged(f"it has {num_bytes} bytes, the manifest says {entry.bytes}")
    digest = hashlib.sha256()
    for view in storage.ranges([ByteRange(name, at, min(_PIECE_BYTES, num_bytes - at)) for at in range(0, num_bytes, _PIECE_BYTES)]):
        digest.update(view)
    if (got := digest.hexdigest()) != entry.sha256:
        raise file.damaged(f"its sha256 is {got[:16]}..., the manifest says {entry.sha256[:16]}...", got=got, wanted=entry.sha256)


def _looked_at(bounds: I64Array, *, shard_start: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of the tokens to read: from the one before the first document on, without the middle of very long ones."""
    begin = max(int(bounds[0]) - 1, shard_start)
    for document in np.flatnonzero(np.diff(bounds) > 2 * _LOOK_TOKENS).tolist():
        yield from _pieces(begin, int(bounds[document]) + _LOOK_TOKENS)
        begin = int(bounds[document + 1]) - _LOOK_TOKENS
    yield from _pieces(begin, int(bounds[-1]))


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for first in range(begin, end, _LOOK_TOKENS):
        yield first, min(first + _LOOK_TOKENS, end)
