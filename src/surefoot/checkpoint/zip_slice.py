"""Where the bytes lie inside one of the small zips that torch.save writes. No torch; nothing is decompressed or executed.

torch stores its records without compression, so a record is a range of bytes. The directory at the end says where; each header on the way
must say the same. What is found here is a claim of the file: whoever reads by it checks the bytes afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from surefoot.core.errors import Corrupt

Read = Callable[[int, int], bytes]
"""(offset, length) in the slice -> exactly these bytes, or Corrupt or OSError."""

WHOLE_BYTES = 8192
"""Slices up to this size are read at once: a counter or a bias is one read."""
MAX_SMALL_BYTES = 16 << 20
"""Of a directory, and of a record that is read at once: a plain tensor has some hundred bytes of both, a pickled list of many more."""
_HEAD_BYTES = 2048
_TAIL_BYTES = 2048
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_NO_ROOM_32, _NO_ROOM_16 = 0xFFFFFFFF, 0xFFFF
_EXTRA64 = 1


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One stored record. `name` is without the archive's own folder; `header` is where its local header starts in the slice."""

    name: str
    header: int
    num_bytes: int
    crc32: int


class ZipSlice:
    """One zip inside a file. `read` is relative to its start; raises Corrupt when this is no zip as torch writes it."""

    def __init__(self, read: Read, *, length: int) -> None:
        self.length = length
        self._read = read
        whole = length <= WHOLE_BYTES
        self._head = read(0, length if whole else _HEAD_BYTES)
        self._tail = self._head if whole else read(length - _TAIL_BYTES, _TAIL_BYTES)
        self.records = self._directory()

    def record(self, name: str) -> ZipRecord:
        if name not in self.records:
            raise Corrupt(f"no record {name}")
        return self.records[name]

    def offset(self, record: ZipRecord) -> int:
        """Where the bytes of the record start in the slice, by its local header, which must agree with the directory."""
        raw = self.bytes_at(record.header, _LOCAL.size)
        signature, _, _, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack(raw)
        start = record.header + _LOCAL.size
        name = self.bytes_at(start, name_length)
        if signature != b"PK\x03\x04" or method != 0 or _without_folder(name) != record.name:
            raise Corrupt(f"the header of record {record.name} is not the one that the directory means")
        offset = start + int(name_length) + int(extra_length)
        if offset + record.num_bytes > self.length:
            raise Corrupt(f"record {record.name} ends outside of its part")
        return offset

    def content(self, name: str) -> bytes:
        """The bytes of a small record."""
        record = self.record(name)
        if record.num_bytes > MAX_SMALL_BYTES:
            raise Corrupt(f"record {name} has {record.num_bytes} bytes, at most {MAX_SMALL_BYTES} are read")
        return self.bytes_at(self.offset(record), record.num_bytes)

    def bytes_at(self, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > self.length:
            raise Corrupt(f"bytes {offset} to {offset + length} lie outside of the part")
        if offset + length <= len(self._head):
            return self._head[offset : offset + length]
        tail = self.length - len(self._tail)
        if offset >= tail:
            return self._tail[offset - tail : offset - tail + length]
        return self._read(offset, length)

    def _directory(self) -> dict[str, ZipRecord]:
        end = self.length - _END.size
        signature, _, _, _, count, num_bytes, start, comment = _END.unpack(self.bytes_at(end, _END.size))
        if signature != b"PK\x05\x06" or comment:
            raise Corrupt("no end of a zip where the part ends")
        locator = self.bytes_at(end - _LOCATOR64.size, _LOCATOR64.size) if end >= _LOCATOR64.size else b""
        if locator[:4] == b"PK\x06\x07":
            end = int(_LOCATOR64.unpack(locator)[2])
            signature, _, _, _, _, _, _, count, num_bytes, start = _END64.unpack(self.bytes_at(end, _END64.size))
            if signature != b"PK\x06\x06":
                raise Corrupt("no end of a zip where its locator points")
        if start + num_bytes != end:
            raise Corrupt("the directory of the zip does not end where the zip ends")
        if num_bytes > MAX_SMALL_BYTES:
            raise Corrupt(f"the directory of the zip has {num_bytes} bytes, at most {MAX_SMALL_BYTES} are read")
        records = _entries(self.bytes_at(start, num_bytes))
        if len(records) != count:
            raise Corrupt(f"the zip names {len(records)} records, its end says {count}")
        return records


def _entries(raw: bytes) -> dict[str, ZipRecord]:
    records: dict[str, ZipRecord] = {}
    position = 0
    while position < len(raw):
        if position + _ENTRY.size > len(raw):
            raise Corrupt("the directory of the zip is cut off")
        fields = _ENTRY.unpack_from(raw, position)
        signature, method, crc32, stored, size = fields[0], fields[4], fields[7], fields[8], fields[9]
        name_length, extra_length, comment_length, header = fields[10], fields[11], fields[12], fields[16]
        position += _ENTRY.size
        name = _without_folder(raw[position : position + name_length])
        extra = raw[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + comment_length
        size, stored, header = _wide(extra, size, stored, header)
        if signature != b"PK\x01\x02" or method != 0 or stored != size or name in records:
            raise Corrupt(f"record {name!r} is not one that torch writes")
        records[name] = ZipRecord(name, header=header, num_bytes=size, crc32=crc32)
    return records


def _wide(extra: bytes, *values: int) -> list[int]:
    """Sizes and offset with those that need 64 bits put in from the extra field, in the order in which they stand there."""
    found = list(values)
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == _EXTRA64:
            wide = iter(struct.unpack_from(f"<{min(length, len(extra) - position - 4) // 8}Q", extra, position + 4))
            return [next(wide, value) if value == _NO_ROOM_32 else value for value in found]
        position += 4 + length
    return found


def _without_folder(name: bytes) -> str:
    return name.decode("utf-8", "replace").partition("/")[2]
