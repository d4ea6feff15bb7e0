"""Slots: one host copy of what one rank saves, in shared memory that outlives the rank. No torch.

    0        page of the header: identity, state word, wish to cancel, what the rank wrote, what the uploader found
    4096     the image: the exact bytes of the rank's file, a multiple of 4096
    then     the index: JSON, which parts lie where in the image, with their checksums and digests

Each state has one owner, and only the owner leaves it, so no lock is needed: the rank owns FREE, STAGING, COMMITTED and FAILED, the
uploader owns STAGED and UPLOADING. The state is one aligned word, switched last. Everything else is checked by a checksum of its own, so
that what a killed writer left half written is nothing, never something else. The memory only grows: fresh pages cost far more than a copy.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import xxhash

from surefoot.core.errors import Corrupt, SurefootError
from surefoot.core.strict_json import canonical

SLOT_FORMAT = 1
PAGE_BYTES = 4096
_MAGIC = b"sfslot\0\0"
_IDENTITY = struct.Struct("<8sIII")  # magic, format, rank, number
_STATE_WORD, _CANCEL_WORD = 16, 17  # as 32-bit words of the page: bytes 64 and 68
_RANK_AREA = (128, 2304)
_UPLOADER_AREA = (2304, PAGE_BYTES)
_AREA = struct.Struct("<IIQ")  # length, serial of the save it speaks of, xxh3_64 of both and the text
_MAX_ERROR_CHARS = 300
_READ_TRIES = 100
_WORD_MASK = (1 << 32) - 1


class SlotState(IntEnum):
    """Values travel in shared memory, so they never change meaning."""

    FREE = 0
    STAGING = 1
    STAGED = 2
    UPLOADING = 3
    COMMITTED = 4
    FAILED = 5

    @property
    def reusable(self) -> bool:
        """Whether a rank may fill the slot: no upload needs its bytes any more."""
        return self in (SlotState.FREE, SlotState.COMMITTED, SlotState.FAILED)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Whose bytes these are. `index_bytes` is 0 until staged, `image_xxh3_128` and `host` empty until committed, `error` until failed.

    `told` are the parts of the error (what, where, hint, values). `read_back` is "verified" or "damaged" once storage was asked. `serial`
    grows with every claim of the slot: whoever reads the image while a rank may claim it compares it before and after.
    """

    run: str
    id: str
    step: int
    attempt: int
    generation: int
    rank: int
    world_size: int
    file: str
    image_bytes: int
    index_bytes: int = 0
    index_xxh3_128: str = ""
    image_xxh3_128: str = ""
    host: str = ""
    error: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)
    read_back: str = ""
    serial: int = 0


class Slot:
    """One host copy of one rank, in a memfd; `rank` and `number` name it. Close it in every process that has it."""

    def __init__(self, fd: int, *, rank: int, number: int) -> None:
        """Takes `fd` over. Fresh memory is made a free slot; anything else must be the slot of this rank and number."""
        self.fd = fd
        self.rank = rank
        self.number = number
        grow(fd, PAGE_BYTES)
        self._page_map = mmap.mmap(fd, PAGE_BYTES)
        self._page = memoryview(self._page_map)
        self._words = self._page.cast("I")
        self._body_map: mmap.mmap | None = None
        self._body = memoryview(b"")
        if not any(self._page[: _IDENTITY.size]):
            self._page[: _IDENTITY.size] = _IDENTITY.pack(_MAGIC, SLOT_FORMAT, rank, number)
        magic, version, found_rank, found_number = _IDENTITY.unpack_from(self._page)
        if magic != _MAGIC or version != SLOT_FORMAT or (found_rank, found_number) != (rank, number):
            raise SurefootError(
                f"this memory is not slot {number} of rank {rank} of this release",
                where=f"fd {fd}",
                hint="agent and workers must run the same surefoot",
                got=(version, found_rank, found_number),
                wanted=(SLOT_FORMAT, rank, number),
            )

    @classmethod
    def create(cls, *, rank: int, number: int) -> Slot:
        """A fresh slot. Its fd is closed on exec: pass it on by name (`pass_fds`)."""
        return cls(_anonymous_file(), rank=rank, number=number)

    @classmethod
    def open(cls, fd: int, *, rank: int, number: int) -> Slot:
        """The slot behind a received fd, which stays the caller's. Raises SurefootError when there is none."""
        try:
            own = os.dup(fd)
        except OSError as error:
            raise SurefootError(f"no slot behind this descriptor: {error}", where=f"fd {fd}", hint="was it passed on?") from error
        return cls(own, rank=rank, number=number)

    def state(self) -> SlotState:
        return SlotState(self._words[_STATE_WORD])

    def header(self) -> SlotHeader | None:
        """What the slot holds, None when it never held anything or its writer was killed while it wrote the header."""
        found = self._read_area(_RANK_AREA)
        if found is None:
            return None
        values, serial = found
        outcome = self._read_area(_UPLOADER_AREA)
        if outcome is not None and outcome[1] == serial:
            values |= outcome[0]
        return SlotHeader(**values, serial=serial)

    def image(self) -> memoryview:
        """The bytes of the rank's file. Empty when there is no header."""
        header = self.header()
        return self._map(header.image_bytes)[: header.image_bytes] if header else memoryview(b"")

    def index(self) -> dict[str, Any]:
        """What was staged with the image. Raises Corrupt when it is not what the rank wrote."""
        header = self.header()
        if header is None or not header.index_bytes:
            raise Corrupt("nothing is staged here", where=str(self))
        end = header.image_bytes + header.index_bytes
        raw = bytes(self._map(end)[header.image_bytes : end])
        if xxhash.xxh3_128_hexdigest(raw) != header.index_xxh3_128:
            raise Corrupt("the index is not what the rank wrote", where=str(self))
        index: dict[str, Any] = json.loads(raw)
        return index

    # --- by the rank ---

    def reserve(self, image_bytes: int, *, extra_bytes: int = 0) -> None:
        """Take and touch the memory of a later claim; what the slot holds stays. OSError when the system has none left."""
        grow(self.fd, PAGE_BYTES + image_bytes + extra_bytes)
        np.frombuffer(self._map(image_bytes + extra_bytes), dtype=np.uint8)[::PAGE_BYTES].sum()  # leaves the interpreter to others

    def claim(self, header: SlotHeader, *, extra_bytes: int = 0) -> memoryview:
        """Begin a save: STAGING, with room for the image, which is returned, and about `extra_bytes` for the index.

        Raises SurefootError when an upload still needs the slot, OSError when the system has no memory left.
        """
        self._leave(*(state for state in SlotState if state.reusable))
        serial = self._serial() + 1
        grow(self.fd, PAGE_BYTES + header.image_bytes + extra_bytes)
        image = self._map(header.image_bytes)[: header.image_bytes]
        self._write_area(_RANK_AREA, _rank_part(header), serial=serial)  # first: who sees STAGING sees whose it is
        self._switch(SlotState.STAGING)
        return image

    def staged(self, index: Mapping[str, Any]) -> None:
        """End the staging: the image is whole, and now the uploader's."""
        self._leave(SlotState.STAGING)
        found = self._read_area(_RANK_AREA)
        assert found is not None
        values, serial = found
        raw = canonical(index)
        start = int(values["image_bytes"])
        grow(self.fd, PAGE_BYTES + start + len(raw))
        self._map(start + len(raw))[start : start + len(raw)] = raw
        values |= {"index_bytes": len(raw), "index_xxh3_128": xxhash.xxh3_128_hexdigest(raw)}
        self._write_area(_RANK_AREA, values, serial=serial)
        self._switch(SlotState.STAGED)

    def abandon(self, error: SurefootError) -> None:
        """Staging did not end: nothing of this save is uploaded, and the slot may be filled again."""
        self._leave(SlotState.STAGING)
        values, serial = self._read_area(_RANK_AREA) or ({}, self._serial())
        if values:
            room = _room(_RANK_AREA) - len(canonical(values))
            self._write_area(_RANK_AREA, values | _told(error, num_bytes=room), serial=serial)
        self._switch(SlotState.FAILED)

    def cancel(self) -> None:
        """Ask the uploader to give up what is staged here now: another rank's part of the same save failed."""
        self._words[_CANCEL_WORD] = self._serial() & _WORD_MASK

    # --- by the uploader ---

    @property
    def cancelled(self) -> bool:
        serial = self._serial()
        return serial > 0 and self._words[_CANCEL_WORD] == serial & _WORD_MASK

    def begin_upload(self) -> None:
        self._leave(SlotState.STAGED)
        self._switch(SlotState.UPLOADING)

    def committed(self, *, image_xxh3_128: str, host: str) -> None:
        """The checkpoint is published. The bytes stay, as the memory tier, until the slot is claimed again."""
        self._leave(SlotState.UPLOADING)
        self._write_area(_UPLOADER_AREA, {"image_xxh3_128": image_xxh3_128, "host": host}, serial=self._serial())
        self._switch(SlotState.COMMITTED)

    def read_back(self, *, serial: int, well: bool) -> None:
        """What storage gave back of the save `serial`; nothing when the slot holds another one by now."""
        found = self._read_area(_UPLOADER_AREA)
        if found is not None and found[1] == serial == self._serial():
            self._write_area(_UPLOADER_AREA, found[0] | {"read_back": "verified" if well else "damaged"}, serial=serial)

    def failed(self, error: SurefootError) -> None:
        """The upload ended without a commit."""
        self._leave(SlotState.STAGED, SlotState.UPLOADING)
        self._write_area(_UPLOADER_AREA, _told(error, num_bytes=_room(_UPLOADER_AREA)), serial=self._serial())
        self._switch(SlotState.FAILED)

    def reset(self) -> None:
        """Whatever a dead rank or uploader left is nobody's now: free. Only for who knows that no process works on it."""
        self._switch(SlotState.FREE)

    def close(self) -> None:
        """Unmap and close. Views that were handed out keep their memory until they are gone."""
        self._words.release()
        self._page.release()
        self._page_map.close()
        self._body = memoryview(b"")
        self._body_map = None
        os.close(self.fd)

    def __str__(self) -> str:
        return f"slot {self.number} of rank {self.rank}"

    def _leave(self, *allowed: SlotState) -> None:
        if (state := self.state()) not in allowed:
            raise SurefootError(
                f"it is {state.name.lower()}, not {' or '.join(other.name.lower() for other in allowed)}",
                where=str(self),
                hint="a slot is never taken from whoever works on it",
            )

    def _switch(self, state: SlotState) -> None:
        self._words[_STATE_WORD] = state  # one aligned store

    def _serial(self) -> int:
        """Of the newest claim, also when its header is torn."""
        return int(_AREA.unpack_from(self._page, _RANK_AREA[0])[1])

    def _map(self, num_bytes: int) -> memoryview:
        """At least `num_bytes` behind the header. A mapping lives as long as it is large enough: mapping anew faults every page again."""
        if len(self._body) < num_bytes:
            have = os.fstat(self.fd).st_size - PAGE_BYTES
            if have < num_bytes:
                raise Corrupt(f"{num_bytes} bytes were announced, {have} are there", where=str(self))
            self._body_map = mmap.mmap(self.fd, have, offset=PAGE_BYTES)
            self._body = memoryview(self._body_map)
        return self._body

    def _read_area(self, area: tuple[int, int]) -> tuple[dict[str, Any], int] | None:
        start = area[0]
        for _ in range(_READ_TRIES):
            length, serial, checksum = _AREA.unpack_from(self._page, start)
            if not length:
                return None
            if length <= _room(area):
                raw = bytes(self._page[start + _AREA.size : start + _AREA.size + length])
                if _checksum(raw, serial) == checksum:
                    values: dict[str, Any] = json.loads(raw)
                    return values, serial
        return None

    def _write_area(self, area: tuple[int, int], values: Mapping[str, Any], *, serial: int) -> None:
        start = area[0]
        raw = canonical(values)
        if len(raw) > _room(area):
            raise SurefootError(f"a header of {len(raw)} bytes does not fit into {_room(area)}", where=str(self))
        self._page[start + _AREA.size : start + _AREA.size + len(raw)] = raw
        self._page[start : start + _AREA.size] = _AREA.pack(len(raw), serial, _checksum(raw, serial))


def grow(fd: int, num_bytes: int) -> None:
    """Make the memory behind `fd` at least so large, whoever else does the same now; it never gets smaller.

    The pages are taken here: memory that is not there is an OSError now, not a killed process at the first touch.
    """
    missing = num_bytes - os.fstat(fd).st_size
    if missing <= 0:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    else:
        os.ftruncate(fd, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)


def _room(area: tuple[int, int]) -> int:
    start, stop = area
    return stop - start - _AREA.size


def _rank_part(header: SlotHeader) -> dict[str, Any]:
    cleared = replace(header, index_bytes=0, index_xxh3_128="", image_xxh3_128="", host="", error="", told={}, read_back="")
    return {name: value for name, value in asdict(cleared).items() if name != "serial"}


def _told(error: SurefootError, *, num_bytes: int) -> dict[str, Any]:
    """The error in at most `num_bytes`, cut where it is longer: all but the code may go."""
    values = {name: value for name, value in error.values.items() if isinstance(value, int | float | str) and len(str(value)) < 100}
    for num_chars, num_values in ((_MAX_ERROR_CHARS, 6), (_MAX_ERROR_CHARS // 2, 3), (_MAX_ERROR_CHARS // 6, 0), (12, 0), (0, 0)):
        what, where, hint = error.what[:num_chars], error.where[max(0, len(error.where) - num_chars) :], error.hint[:num_chars]
        told = {"code": error.code, "what": what, "where": where, "hint": hint, "values": dict(list(values.items())[:num_values])}
        found = {"error": str(error)[:num_chars], "told": told}
        if len(canonical(found)) <= num_bytes:
            break
    return found


def _checksum(raw: bytes, serial: int) -> int:
    return int(xxhash.xxh3_64_intdigest(raw, seed=serial))


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("surefoot-slot")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
