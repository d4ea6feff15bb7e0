"""How one source is read, again and again in the same order, by any process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from surefoot.data.corpus import CorpusFile
from surefoot.data.cutting import Cutting
from surefoot.data.documents import Document, OnBadRecord, Record, records_of
from surefoot.data.parts import Chunk
from surefoot.data.quality.rules import RuleSet


@dataclass(frozen=True, slots=True)
class Corpus:
    """One source: its files in order, how they are cut, and what becomes of a record that is no document.

    `skip_command` is for the error about one. Those of `rules` that drop decide over documents, but for what `rules_off` names.
    """

    source: str
    files: Sequence[CorpusFile]
    cutting: Cutting
    on_bad_record: OnBadRecord = "fail"
    skip_command: str = ""
    rules: RuleSet | None = None
    rules_off: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def reader(self) -> Reader:
        return Reader(self.source, tuple(file.name for file in self.files), self.cutting.text_field, self.cutting.max_record_bytes)


@dataclass(frozen=True, slots=True)
class Reader:
    """From chunks to records. `files` are the names of the files that chunks number."""

    source: str
    files: tuple[str, ...]
    text_field: str
    max_record_bytes: int

    def records(self, chunk: Chunk) -> Iterator[tuple[int, Record]]:
        """Each record with the number of its file, documents without text among them."""
        for part in chunk.parts:
            number, name = part.place.file, self.files[part.place.file]
            for record in records_of(
                part, source=self.source, file=name, text_field=self.text_field, max_record_bytes=self.max_record_bytes
            ):
                yield number, record


def is_empty(document: Document) -> bool:
    """Whether there is no text in it: it is dropped and counted."""
    return not document.text.strip()
