"""Bytes kept in memory for ranks that may die: a budget never exceeded, generations that fence, and what may be thrown away. No torch."""

from __future__ import annotations

import itertools
import mmap
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash

from surefoot.core.errors import CheckpointError, Corrupt, Incomplete, PeerLost
from surefoot.core.units import show_bytes

KEPT_COMPLETE = 2
"""Complete ones per rank that stay while there is room: when a node dies in a save, another rank may have completed only the one before."""

_KEY = re.compile(r"(s\d+-a\d+(?:-r\d+)?)/(\d+)/([^/\0]+)")
_MAX_KEY_CHARS = 400


def kept_key(checkpoint: str, *, rank: int, name: str) -> str:
    """`<id>/<rank>/<file>`: what belongs together, so that it is complete, and goes, together."""
    return f"{checkpoint}/{rank}/{name}"


@dataclass(frozen=True, slots=True)
class Kept:
    """One range. `xxh3_128` is that of its writer, compared when the bytes had come."""

    data: memoryview
    xxh3_128: str
    generation: int


@dataclass(slots=True)
class _Share:
    """A share: all ranges of one checkpoint and rank. `touched` counts up over all shares with each range and each completion."""

    generation: int
    keys: set[str] = field(default_factory=set)
    touched: int = 0
    is_complete: bool = False


class KeptBytes:
    """A ByteKeeper in this process, and what a keeper serves. All methods may be called from several threads."""

    def __init__(self, *, budget_bytes: int, generation: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self._generation = generation
        self._kept: dict[str, Kept] = {}
        self._shares: dict[tuple[str, int], _Share] = {}
        self._reserved_bytes = 0
        self._touches = itertools.count()
        self._lock = threading.Lock()

    def put(self, key: str, data: memoryview) -> None:
        """Copy `data` in, under the newest generation known here."""
        with self.receiving(key, num_bytes=data.nbytes, generation=self.generation) as buffer:
            buffer[:] = data.cast("B")

    def get(self, key: str) -> memoryview:
        """The bytes as they are kept: read-only, compared with the checksum of their writer. Raises Incomplete or Corrupt."""
        return self.verified(key).data

    def verified(self, key: str) -> Kept:
        """As `get`, with the checksum."""
        kept = self.look(key)
        found = str(xxhash.xxh3_128(kept.data).hexdigest())
        if found != kept.xxh3_128:
            raise Corrupt(f"xxh3_128 {found}, its writer had {kept.xxh3_128}", where=key, hint="take another copy", kind="damaged")
        return kept

    def look(self, key: str) -> Kept:
        """Without reading the bytes."""
        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            raise Incomplete("nothing is kept under this key", where=key, kind="missing")
        return kept

    def keys(self) -> list[str]:
        with self._lock:
            return sorted(self._kept)

    def listing(self) -> dict[str, tuple[int, str]]:
        """Bytes and xxh3_128 of all ranges."""
        with self._lock:
            return {key: (kept.data.nbytes, kept.xxh3_128) for key, kept in self._kept.items()}

    def drop(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def used_bytes(self) -> int:
        """What is kept and what is on its way in."""
        with self._lock:
            return self._used()

    def fence(self, generation: int) -> None:
        """From now on nothing of an older generation is taken. Raises PeerLost when this one is older itself."""
        with self._lock:
            self._refuse_past(generation)

    @contextmanager
    def receiving(self, key: str, *, num_bytes: int, generation: int, xxh3_128: str | None = None) -> Iterator[memoryview]:
        """Room for a new range; kept when the block ends without an error. Until then, and after one, the old range stays.

        Raises CheckpointError with the numbers (kind "budget") when there is no room, PeerLost for an older generation, and Corrupt at the
        end when the bytes are not those of `xxh3_128`.
        """
        if len(key) > _MAX_KEY_CHARS or num_bytes < 0:
            what = f"a key of {len(key)} characters (at most {_MAX_KEY_CHARS}) and {num_bytes} bytes"
            raise CheckpointError(what, where=key[:40], kind="refused")
        with self._lock:
            self._refuse_past(generation)
            self._make_room(num_bytes, key=key)
            self._reserved_bytes += num_bytes
        try:
            data = memoryview(mmap.mmap(-1, num_bytes)) if num_bytes else memoryview(bytearray())
            yield data
            found = str(xxhash.xxh3_128(data).hexdigest())
            if xxh3_128 is not None and found != xxh3_128:
                raise Corrupt(f"xxh3_128 {found} came, {xxh3_128} was meant", where=key, kind="damaged")
            with self._lock:
                self._refuse_past(generation)
                self._keep(key, Kept(data.toreadonly(), found, generation))
        finally:
            with self._lock:
                self._reserved_bytes -= num_bytes

    def complete(self, checkpoint: str, *, rank: int, files: Mapping[str, str], generation: int) -> None:
        """Say that these files (name -> xxh3_128) are all of a rank's share. Older shares of the rank may go from now on.

        Raises Incomplete when one of them is not here with this checksum.
        """
        with self._lock:
            self._refuse_past(generation)
            if not files:
                raise Incomplete("a share without files is none", where=f"{checkpoint}/{rank}", kind="missing")
            for name, xxh3_128 in files.items():
                kept = self._kept.get(kept_key(checkpoint, rank=rank, name=name))
                if kept is None or kept.xxh3_128 != xxh3_128:
                    had = kept.xxh3_128 if kept else "nothing"
                    raise Incomplete(f"{had} is kept of {name}, wanted {xxh3_128}", where=f"{checkpoint}/{rank}", kind="missing")
            share = self._shares.get((checkpoint, rank))
            if share is None:
                raise Incomplete("no checkpoint has such an id", where=f"{checkpoint}/{rank}", kind="missing")
            share.is_complete, share.touched = True, next(self._touches)
            complete = [other for other in self._older(rank, but="") if self._shares[other].is_complete]
            for other in complete[:-KEPT_COMPLETE]:
                self._drop_share(other)

    def complete_ranks(self, checkpoint: str) -> list[int]:
        with self._lock:
            return sorted(rank for (name, rank), share in self._shares.items() if name == checkpoint and share.is_complete)

    def _refuse_past(self, generation: int) -> None:
        if generation < self._generation:
            raise PeerLost(
                f"fenced: generation {generation} writes to a keeper that is at generation {self._generation}",
                where="keeper",
                hint="another process took the run over; this one must end",
                got=generation,
                limit=self._generation,
            )
        self._generation = generation

    def _make_room(self, num_bytes: int, *, key: str) -> None:
        match = _KEY.fullmatch(key)
        going: list[tuple[str, int]] = []
        gained = 0
        lacking = self._used() + num_bytes - self.budget_bytes
        if lacking > 0 and match:
            for other in self._evictable(int(match[2]), but=match[1]):
                if gained >= lacking:
                    break
                going.append(other)
                gained += self._share_bytes(other)
        if gained < lacking:
            raise CheckpointError(
                f"no room in the keeper: {show_bytes(num_bytes)} wanted, {show_bytes(self._used())} of {show_bytes(self.budget_bytes)} "
                f"in use, {show_bytes(gained)} of them could go",
                where=key,
                hint="raise the budget of the keeper, or keep this tier for fewer ranks",
                kind="budget",
                wanted_bytes=num_bytes,
                used_bytes=self._used(),
                budget_bytes=self.budget_bytes,
            )
        for other in going:
            self._drop_share(other)

    def _evictable(self, rank: int, *, but: str) -> list[tuple[str, int]]:
        """Shares of this rank before its newest complete one, and unfinished ones whose writer is fenced; the oldest first."""
        older = self._older(rank, but=but)
        newest = max((self._shares[other].touched for other in older if self._shares[other].is_complete), default=-1)
        return [other for other in older if self._shares[other].touched < newest or self._is_orphan(self._shares[other])]

    def _is_orphan(self, share: _Share) -> bool:
        return not share.is_complete and share.generation < self._generation

    def _older(self, rank: int, *, but: str) -> list[tuple[str, int]]:
        shares = [other for other in self._shares if other[1] == rank and other[0] != but]
        return sorted(shares, key=lambda other: self._shares[other].touched)

    def _keep(self, key: str, kept: Kept) -> None:
        self._kept[key] = kept
        if match := _KEY.fullmatch(key):
            share = self._shares.setdefault((match[1], int(match[2])), _Share(kept.generation))
            share.keys.add(key)
            share.generation, share.touched = kept.generation, next(self._touches)
            share.is_complete = False  # until it is said again: a range has changed

    def _drop(self, key: str) -> None:
        if self._kept.pop(key, None) is not None and (match := _KEY.fullmatch(key)):
            share = self._shares[match[1], int(match[2])]
            share.keys.discard(key)
            share.is_complete = False  # one that lacks a file is none to go back to
            if not share.keys:
                del self._shares[match[1], int(match[2])]

    def _drop_share(self, which: tuple[str, int]) -> None:
        for key in self._shares.pop(which).keys:
            self._kept.pop(key, None)

    def _share_bytes(self, which: tuple[str, int]) -> int:
        return sum(self._kept[key].data.nbytes for key in self._shares[which].keys)

    def _used(self) -> int:
        return self._reserved_bytes + sum(kept.data.nbytes for kept in self._kept.values())
