"""The first pass over a corpus: read everything, name what is bad, and settle which documents are held out, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import DataError
from surefoot.core.units import show_bytes
from surefoot.data.corpus import CorpusFile
from surefoot.data.documents import Document, OnBadRecord, Tally, distinct_documents


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage of preparing is, in bytes of text. While reading, the total is the size of the files, JSON and copies included."""

    stage: Literal["reading", "training tokenizer", "tokenizing"]
    done_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        return f"{self.stage:<20} {show_bytes(self.done_bytes)} of {show_bytes(self.total_bytes)}"


def paced(tell: Callable[[Progress], None], *, interval_s: float = 2.0, clock: Clock | None = None) -> Callable[[Progress], None]:
    """`tell`, called at the start of each stage and then at most every `interval_s`: work reports after every document."""
    clock = clock or SystemClock()
    stage, told_s = "", 0.0

    def tell_sometimes(progress: Progress) -> None:
        nonlocal stage, told_s
        now_s = clock.monotonic_s()
        if progress.stage != stage or now_s - told_s >= interval_s:
            stage, told_s = progress.stage, now_s
            tell(progress)

    return tell_sometimes


@dataclass(frozen=True, slots=True)
class Corpus:
    """How to read one source, again and again in the same order. `skip_command` is for the error about a bad record."""

    source: str
    files: Sequence[CorpusFile]
    text_field: str
    on_bad_record: OnBadRecord
    skip_command: str

    def documents(self, *, tally: Tally) -> Iterator[tuple[Document, bytes]]:
        """One pass: the documents that count with their sha256; `tally` is filled on the way."""
        return distinct_documents(
            self.files,
            source=self.source,
            text_field=self.text_field,
            on_bad_record=self.on_bad_record,
            skip_command=self.skip_command,
            tally=tally,
        )


@dataclass(frozen=True, slots=True)
class Survey:
    """What is in a corpus. `heldout_limit` splits it: a document whose sha256, as a number, lies below it is held out."""

    num_documents: int
    text_bytes: int
    documents_sha256: str
    heldout_fraction: float
    heldout_limit: int

    def is_heldout(self, digest: bytes) -> bool:
        return int.from_bytes(digest, "big") < self.heldout_limit


def take_survey(corpus: Corpus, *, heldout_fraction: float, progress: Callable[[Progress], None]) -> Survey:
    """Read the whole corpus once. Raises DataError for a bad record (unless they are skipped) and for a corpus without a document."""
    tally = Tally()
    total_bytes = sum(file.num_bytes for file in corpus.files)
    fraction_limit = int(heldout_fraction * 2**64) << 192
    smallest, largest, num_below = 1 << 256, 0, 0
    for _, digest in corpus.documents(tally=tally):
        value = int.from_bytes(digest, "big")
        smallest, largest = min(smallest, value), max(largest, value)
        num_below += value < fraction_limit
        progress(Progress("reading", tally.text_bytes, total_bytes))
    if not tally.num_documents:
        raise DataError(
            f"no document in {len(corpus.files)} files ({tally.num_empty} empty, {len(tally.bad_records)} bad records)",
            where=f"source {corpus.source!r}",
            hint="an empty corpus cannot be trained on: check the input and --text-field",
        )
    limit = fraction_limit
    if heldout_fraction == 0 or tally.num_documents == 1:
        limit = 0
    elif num_below == 0:
        limit = smallest + 1
    elif num_below == tally.num_documents:
        limit = largest
    return Survey(
        num_documents=tally.num_documents,
        text_bytes=tally.text_bytes,
        documents_sha256=tally.documents_sha256,
        heldout_fraction=heldout_fraction,
        heldout_limit=limit,
    )
