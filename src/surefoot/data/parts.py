"""What a pass over a source is made of: runs of whole records, cut from files and gathered into chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot.core.units import show_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """A point between two records: the file, and how much of its unpacked content lies before, in bytes (rows in Parquet) and records."""

    file: int = 0
    offset: int = 0
    record: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Whole records of one file from `place` on; with a `reason`, one record that is none.

    `data` are bytes of the unpacked file; of Parquet, the column of texts as an Arrow stream.
    """

    kind: Literal["text", "jsonl", "parquet"]
    place: Place
    data: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts in order, where the next chunk begins, and how many bytes of the files on disk lie before that."""

    parts: tuple[Part, ...]
    end: Place
    done_bytes: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A part, what comes after it, and how far into its file that is, in bytes on disk."""

    part: Part
    end: Place
    file_bytes: int


def too_long(max_record_bytes: int) -> str:
    return f"longer than {show_bytes(max_record_bytes)}; `surefoot data prepare --max-record-bytes N` raises the limit"
