"""The form of one ledger line, and how the end of a ledger is found without reading all of it.

A line is compact JSON in the order of `LedgerEntry`'s fields. `hash` is sha256 over the canonical JSON of all its other keys, so a later
release may add keys and this one still verifies them. The format version stands in the first line's fields as `ledger_format`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from surefoot.core import strict_json
from surefoot.core.errors import Incompatible
from surefoot.core.hashing import sha256_json
from surefoot.core.records import LedgerEntry

LEDGER_FORMAT = 1
_FIELDS = tuple(field.name for field in fields(LedgerEntry))
_NUMBERS = ("seq", "generation", "attempt", "step")
_TEXTS = ("time_utc", "event", "by", "rule", "reason", "prev", "hash")
_TAIL_BYTES = 4096


def seal(values: Mapping[str, Any]) -> LedgerEntry:
    """The entry made of all fields but `hash`, with its hash."""
    return LedgerEntry(**values, hash=sha256_json(values))


def encode(raw: Mapping[str, Any]) -> bytes:
    """The one line that stands for `raw` in the file, newline included."""
    return json.dumps(raw, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def encode_entry(entry: LedgerEntry) -> bytes:
    return encode({name: getattr(entry, name) for name in _FIELDS})


def decode(line: bytes) -> dict[str, Any] | None:
    """The raw object on a line; None when it is not an entry at all. Whether it is the right entry is for `verify_ledger` to say."""
    try:
        raw = strict_json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("fields"), dict):
        return None
    is_entry = all(type(raw.get(name)) is int for name in _NUMBERS) and all(type(raw.get(name)) is str for name in _TEXTS)
    return raw if is_entry else None


def entry_of(raw: Mapping[str, Any]) -> LedgerEntry:
    return LedgerEntry(**{name: raw[name] for name in _FIELDS})


def refuse_newer_format(entry: LedgerEntry, *, where: str) -> None:
    """Raises Incompatible when the first entry says that a later release wrote this ledger."""
    version = entry.fields.get("ledger_format", LEDGER_FORMAT) if entry.seq == 1 else LEDGER_FORMAT
    if not isinstance(version, int) or version > LEDGER_FORMAT:
        raise Incompatible(
            f"ledger format {version} is newer than {LEDGER_FORMAT}, the newest that this release reads",
            where=where,
            hint="use the surefoot release that wrote this run, or a later one",
            got=version,
            limit=LEDGER_FORMAT,
        )


@dataclass(frozen=True, slots=True)
class Tail:
    """The last whole entry, the byte where it ends, and whatever stands after it: the torn rest of a write that never finished."""

    entry: LedgerEntry | None
    end: int
    torn: bytes


def read_tail(fd: int, *, num_bytes: int) -> Tail:
    """Read backwards from `num_bytes`, the size of the file, until a whole entry is found."""
    chunk_bytes = _TAIL_BYTES
    while True:
        start = max(0, num_bytes - chunk_bytes)
        data = _pread(fd, num_bytes - start, offset=start)
        tail = _last_entry(data, is_whole_file=start == 0)
        if tail is not None:
            return Tail(tail.entry, start + tail.end, tail.torn)
        chunk_bytes *= 4


def _last_entry(data: bytes, *, is_whole_file: bool) -> Tail | None:
    end = data.rfind(b"\n") + 1
    while end > 0:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        if begin == 0 and not is_whole_file:
            return None  # The line may begin before this chunk.
        raw = decode(data[begin:end])
        if raw is not None:
            return Tail(entry_of(raw), end, data[end:])
        end = begin
    return Tail(None, 0, data) if is_whole_file else None


def _pread(fd: int, num_bytes: int, *, offset: int) -> bytes:
    parts = []
    while num_bytes > 0 and (part := os.pread(fd, num_bytes, offset)):
        parts.append(part)
        num_bytes -= len(part)
        offset += len(part)
    return b"".join(parts)
