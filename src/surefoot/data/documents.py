"""Reading documents: a text file is one, a line of JSONL, a row of Parquet. A record that is none is named by file and line (or row)."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from surefoot.core.errors import DataError
from surefoot.data.corpus import CorpusFile
from surefoot.data.cutting import MAX_RECORD_BYTES, Cutting
from surefoot.data.parts import Part, too_long

OnBadRecord = Literal["fail", "skip"]
_BOM: Final = b"\xef\xbb\xbf"
# No text has one; where it stands, something else was taken for text, or text was cut by a tool that writes C strings.
_NUL: Final = "a NUL character"


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it came from. `record` counts from 1: the line of JSONL, the row of Parquet, always 1 in a text file.

    `byte_offset` and `byte_length` span the record in its file once that is unpacked, the JSON around the text included. In Parquet a row
    has no place of its own: offset 0 and the length of the text.
    """

    text: str
    source: str
    file: str
    record: int
    byte_offset: int
    byte_length: int

    @property
    def sha256(self) -> bytes:
        """Identity of the text, 32 bytes."""
        return hashlib.sha256(self.text.encode()).digest()


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is no document, and why. `line` is the row of a Parquet file."""

    source: str
    file: str
    line: int
    reason: str

    def as_error(self, *, skip_command: str) -> DataError:
        """`skip_command` is the command that would leave such records out."""
        return DataError(
            self.reason,
            where=f"{self.file}:{self.line}",
            hint=f"mend the record, or leave such records out: `{skip_command}`",
            file=self.file,
            line=self.line,
        )


Record = Document | BadRecord


def records_of(part: Part, *, source: str, file: str, text_field: str, max_record_bytes: int) -> Iterator[Record]:
    """The documents and bad records of a part of `file`, in order."""
    if part.reason:
        yield BadRecord(source, file, part.place.record + 1, part.reason)
        return
    read = {"text": _read_text, "jsonl": _read_lines, "parquet": _read_rows}[part.kind]
    yield from read(part, source=source, file=file, text_field=text_field, max_record_bytes=max_record_bytes)


def read_documents(
    files: Sequence[CorpusFile],
    *,
    source: str,
    text_field: str = "text",
    max_record_bytes: int = MAX_RECORD_BYTES,
    on_bad: Callable[[BadRecord], None],
) -> Iterator[Document]:
    """Every document of `files` in order. Records that are none go to `on_bad`, which may raise. An unreadable file is a DataError."""
    for chunk in Cutting(text_field=text_field, max_record_bytes=max_record_bytes).chunks(files):
        for part in chunk.parts:
            name = files[part.place.file].name
            for record in records_of(part, source=source, file=name, text_field=text_field, max_record_bytes=max_record_bytes):
                if isinstance(record, BadRecord):
                    on_bad(record)
                else:
                    yield record


def _read_text(part: Part, *, source: str, file: str, text_field: str, max_record_bytes: int) -> Iterator[Record]:
    text, reason, offset = _decode(part.data)
    if reason:
        yield BadRecord(source, file, part.data.count(b"\n", 0, offset) + 1, reason)
    else:
        yield Document(text=text, source=source, file=file, record=1, byte_offset=0, byte_length=len(part.data))


def _read_lines(part: Part, *, source: str, file: str, text_field: str, max_record_bytes: int) -> Iterator[Record]:
    offset, number = part.place.offset, part.place.record
    for line in io.BytesIO(part.data):
        start, offset, number = offset, offset + len(line), number + 1
        record = line.strip()
        if number == 1:
            record = record.removeprefix(_BOM)
        if not record:
            continue
        if len(line) - line.endswith(b"\n") > max_record_bytes:
            yield BadRecord(source, file, number, too_long(max_record_bytes))
            continue
        text, reason = _text_of_line(record, text_field=text_field)
        if reason:
            yield BadRecord(source, file, number, reason)
        else:
            yield Document(text, source, file, record=number, byte_offset=start, byte_length=len(line.rstrip(b"\r\n")))


def _read_rows(part: Part, *, source: str, file: str, text_field: str, max_record_bytes: int) -> Iterator[Record]:
    from surefoot.data.parquet_rows import values_of

    for row, value in enumerate(values_of(part.data), start=part.place.record + 1):
        text, reason = "", ""
        if value is None:
            reason = f"null in column {text_field!r}"
        elif len(value) > max_record_bytes:
            reason = too_long(max_record_bytes)
        else:
            text, reason, _ = _decode(value)
        if value is None or reason:
            yield BadRecord(source, file, row, reason)
        else:
            yield Document(text, source, file, record=row, byte_offset=0, byte_length=len(value))


def _decode(data: bytes) -> tuple[str, str, int]:
    """(text, "", 0), or ("", why `data` is no text, where in it)."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return "", f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}", error.start
    nul = data.find(b"\0")
    return (text, "", 0) if nul < 0 else ("", f"{_NUL} at offset {nul}", nul)


def _text_of_line(record: bytes, *, text_field: str) -> tuple[str, str]:
    """(text, "") of one JSON line, or ("", why it has none)."""
    try:
        value = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError as error:
        return "", f"not UTF-8: byte 0x{record[error.start]:02x} at offset {error.start} of the line"
    except (ValueError, RecursionError) as error:
        return "", f"broken JSON: {error}"
    if not isinstance(value, dict):
        return "", f"wanted a JSON object, got {type(value).__name__}"
    if text_field not in value:
        has = ", ".join(sorted(value)[:8]) or "none"
        return "", f"no field {text_field!r}; the record has {has}; `surefoot data prepare --text-field NAME` reads another"
    text = value[text_field]
    if not isinstance(text, str):
        return "", f"field {text_field!r} is {type(text).__name__}, wanted a string"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return "", f"field {text_field!r} holds half a surrogate pair at character {error.start}"
    nul = text.find("\0")
    return (text, "") if nul < 0 else ("", f"field {text_field!r} holds {_NUL} at character {nul}")
