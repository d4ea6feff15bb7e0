"""Reading documents: a text file is one, a line of a JSONL file is one. A record that cannot be read is named by file and line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from surefoot.core.errors import DataError
from surefoot.data.corpus import CorpusFile

OnBadRecord = Literal["fail", "skip"]
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it came from. `record` counts from 1: the line in a JSONL file, always 1 in a text file.

    `byte_offset` and `byte_length` span the record in its file, the JSON around the text included.
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
    """A record that is no document, and why."""

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


@dataclass
class Tally:
    """What became of the records of one pass over a source."""

    num_documents: int = 0
    num_duplicates: int = 0
    num_empty: int = 0
    text_bytes: int = 0
    bad_records: list[BadRecord] = field(default_factory=list)
    documents_hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def documents_sha256(self) -> str:
        """The documents so far, as one hash over theirs in order."""
        return self.documents_hash.hexdigest()


def read_documents(
    files: Iterable[CorpusFile], *, source: str, text_field: str = "text", on_bad: Callable[[BadRecord], None]
) -> Iterator[Document]:
    """Every document of `files` in order. Unreadable records go to `on_bad`, which may raise. An unreadable file is a DataError."""
    for file in files:
        try:
            yield from (
                _read_jsonl(file, source=source, text_field=text_field, on_bad=on_bad)
                if file.is_jsonl
                else _read_text(file, source=source, on_bad=on_bad)
            )
        except OSError as error:
            raise DataError(f"cannot read {file.path}: {error.strerror}", where=f"source {source!r}", hint="check the file") from error


def distinct_documents(
    files: Iterable[CorpusFile], *, source: str, text_field: str, on_bad_record: OnBadRecord, skip_command: str, tally: Tally
) -> Iterator[tuple[Document, bytes]]:
    """The documents that count, each with its sha256: empty ones and exact copies of an earlier one are dropped and tallied.

    `on_bad_record` is "fail" (DataError at the first, with `skip_command` as the cure) or "skip" (tallied). Holds 16 bytes per document
    for finding copies.
    """

    def on_bad(bad: BadRecord) -> None:
        if on_bad_record == "fail":
            raise bad.as_error(skip_command=skip_command)
        tally.bad_records.append(bad)

    seen: set[bytes] = set()
    for document in read_documents(files, source=source, text_field=text_field, on_bad=on_bad):
        if not document.text.strip():
            tally.num_empty += 1
            continue
        digest = document.sha256
        if digest[:16] in seen:
            tally.num_duplicates += 1
            continue
        seen.add(digest[:16])
        tally.documents_hash.update(digest)
        tally.num_documents += 1
        tally.text_bytes += len(document.text.encode())
        yield document, digest


def _read_text(file: CorpusFile, *, source: str, on_bad: Callable[[BadRecord], None]) -> Iterator[Document]:
    data = file.path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        on_bad(BadRecord(source, file.name, line, f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"))
        return
    yield Document(text=text, source=source, file=file.name, record=1, byte_offset=0, byte_length=len(data))


def _read_jsonl(file: CorpusFile, *, source: str, text_field: str, on_bad: Callable[[BadRecord], None]) -> Iterator[Document]:
    offset = 0
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            start, offset = offset, offset + len(line)
            record = line.strip()
            if number == 1:
                record = record.removeprefix(_BOM)
            if not record:
                continue
            text, reason = _text_of_record(record, text_field=text_field)
            if text is None:
                on_bad(BadRecord(source, file.name, number, reason))
                continue
            yield Document(
                text=text, source=source, file=file.name, record=number, byte_offset=start, byte_length=len(line.rstrip(b"\r\n"))
            )


def _text_of_record(record: bytes, *, text_field: str) -> tuple[str | None, str]:
    """(text, "") of one JSON line, or (None, why it has none)."""
    try:
        value = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: byte 0x{record[error.start]:02x} at offset {error.start} of the line"
    except (ValueError, RecursionError) as error:
        return None, f"broken JSON: {error}"
    if not isinstance(value, dict):
        return None, f"wanted a JSON object, got {type(value).__name__}"
    if text_field not in value:
        has = ", ".join(sorted(value)[:8]) or "none"
        return None, f"no field {text_field!r}; the record has {has}; `surefoot data prepare --text-field NAME` reads another"
    text = value[text_field]
    if not isinstance(text, str):
        return None, f"field {text_field!r} is {type(text).__name__}, wanted a string"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return None, f"field {text_field!r} holds half a surrogate pair at character {error.start}"
    return text, ""
