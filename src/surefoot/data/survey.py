"""The first pass over a corpus: read all of it, name what is bad, and settle which documents are trained on, before a token is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import DataError
from surefoot.core.strict_json import canonical, loads
from surefoot.core.units import show_bytes
from surefoot.data.choosing import below, first_ones, heldout_limit
from surefoot.data.crew import Crew
from surefoot.data.journal import Journal, Spool, mark_from_json, mark_json
from surefoot.data.parts import Chunk, Place
from surefoot.data.publish import writing
from surefoot.data.reader import Corpus
from surefoot.data.surveyor import SURVEY_ROW, ChunkSurvey, surveyor_of

LEFT_OUT, TRAINED_ON, HELD_OUT = 0, 1, 2
CHUNKS_PER_NOTE: Final = 8  # a note waits for the disk several times
_ROWS_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage of preparing is: while reading in bytes of the files, then in bytes of the text that is kept."""

    stage: Literal["reading", "training tokenizer", "tokenizing"]
    done_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        return f"{self.stage:<20} {show_bytes(self.done_bytes)} of {show_bytes(self.total_bytes)}"


def paced(tell: Callable[[Progress], None], *, interval_s: float = 2.0, clock: Clock | None = None) -> Callable[[Progress], None]:
    """`tell`, called at the start of each stage and then at most every `interval_s`: work reports after every chunk."""
    clock = clock or SystemClock()
    stage, told_s = "", 0.0

    def tell_sometimes(progress: Progress) -> None:
        nonlocal stage, told_s
        now_s = clock.monotonic_s()
        if progress.stage != stage or now_s - told_s >= interval_s:
            stage, told_s = progress.stage, now_s
            tell(progress)

    return tell_sometimes


@dataclass(frozen=True)
class Survey:
    """What is in a corpus. A document whose sha256, as a number, lies below `heldout_limit` is held out.

    `fates` says what becomes of each document that was read, LEFT_OUT, TRAINED_ON or HELD_OUT; `chunk_rows` how many a chunk has. What was
    read of them stays in `folder`. `first_rejects` has, in order, whether a document that a rule dropped is the first of its text.
    """

    num_documents: int
    num_duplicates: int
    num_empty: int
    text_bytes: int
    documents_sha256: str
    heldout_fraction: float
    heldout_limit: int
    fates: npt.NDArray[np.uint8]
    chunk_rows: npt.NDArray[np.uint32]
    first_rejects: npt.NDArray[np.bool_]
    folder: Path

    def is_heldout(self, digest: bytes) -> bool:
        return int.from_bytes(digest, "big") < self.heldout_limit

    @cached_property
    def rows(self) -> npt.NDArray[Any]:
        """A SURVEY_ROW per document that was read, mapped from the disk."""
        return _map_rows(self.folder)

    def rejects(self) -> Iterator[dict[str, Any]]:
        """What was rejected, in order. Of a document that a rule dropped copies are not told."""
        is_first = iter(self.first_rejects)
        with (self.folder / "survey.rejects").open("rb") as lines:
            for line in lines:
                reject = loads(line)
                if "document" not in reject or next(is_first):
                    yield reject


def take_survey(corpus: Corpus, *, heldout_fraction: float, journal: Journal, crew: Crew, progress: Callable[[Progress], None]) -> Survey:
    """Read the whole corpus once; what an interrupted call has read is not read again.

    Raises DataError for a bad record (unless they are skipped) and for a corpus without a document; Damaged.
    """
    with closing(_Pass(corpus, journal=journal)) as pass_:
        if not pass_.is_done:
            pass_.run(crew, progress=progress)
    rows = _map_rows(pass_.folder)
    digests = rows["digest"]
    is_first = first_ones(digests)
    kept = is_first & (rows["rejected"] == 0)
    if not kept.any():
        with writing():
            journal.clear()
        raise DataError(
            f"no document in {len(corpus.files)} files ({pass_.num_empty} empty, {pass_.num_bad} bad records, "
            f"{int(rows['rejected'].sum())} dropped by rules)",
            where=f"source {corpus.source!r}",
            hint="an empty corpus cannot be trained on: check the input and --text-field",
        )
    limit = heldout_limit(digests, kept=kept, fraction=heldout_fraction)
    return Survey(
        num_documents=int(kept.sum()),
        num_duplicates=int((~is_first).sum()),
        num_empty=pass_.num_empty,
        text_bytes=int(rows["text_bytes"][kept].sum(dtype=np.int64)),
        documents_sha256=_sha256_of(digests, kept=kept),
        heldout_fraction=heldout_fraction,
        heldout_limit=limit,
        fates=np.where(kept, np.where(below(digests, limit), HELD_OUT, TRAINED_ON), LEFT_OUT).astype(np.uint8),
        chunk_rows=np.fromfile(pass_.folder / "survey.counts", dtype="<u4"),
        first_rejects=is_first[rows["rejected"] != 0],
        folder=pass_.folder,
    )


class _Pass:
    """The reading itself, and how far it is noted."""

    def __init__(self, corpus: Corpus, *, journal: Journal) -> None:
        self._corpus, self._journal = corpus, journal
        self._note = f"{corpus.source}/survey"
        self.folder = journal.work / corpus.source
        self.folder.mkdir(exist_ok=True)
        noted = journal.read(self._note) or {}
        self._place = Place(*noted.get("place", ()))
        self._done_bytes: int = noted.get("done_bytes", 0)
        self.num_empty: int = noted.get("num_empty", 0)
        self.num_bad: int = noted.get("num_bad", 0)
        self.is_done: bool = noted.get("is_done", False)
        marks = noted.get("marks", {})
        self._spools: dict[str, Spool] = {}
        try:
            for name in ("rows", "counts", "rejects"):
                self._spools[name] = Spool(self.folder / f"survey.{name}", mark=mark_from_json(marks.get(name)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for spool in self._spools.values():
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                spool.close()

    def run(self, crew: Crew, *, progress: Callable[[Progress], None]) -> None:
        corpus = self._corpus
        chunks = corpus.cutting.chunks(corpus.files, start=self._place)
        progress(Progress("reading", self._done_bytes, corpus.num_bytes))
        for number, (chunk, found) in enumerate(crew.map(surveyor_of(corpus), chunks), start=1):
            self._add(chunk, found)
            progress(Progress("reading", self._done_bytes, corpus.num_bytes))
            if number % CHUNKS_PER_NOTE == 0:
                self._write_note()
        self.is_done = True
        self._write_note()

    def _add(self, chunk: Chunk, found: ChunkSurvey) -> None:
        bad = found.bad_records
        if bad and self._corpus.on_bad_record == "fail":
            with writing():
                self._journal.clear()  # what mends this changes the input or the settings: nothing is worth going on with
            raise bad[0].as_error(skip_command=self._corpus.skip_command)
        with writing():
            self._spools["rows"].append(found.rows.tobytes())
            self._spools["counts"].append(np.array([len(found.rows)], dtype="<u4").tobytes())
            self._spools["rejects"].append(b"".join(canonical(reject) + b"\n" for reject in found.rejects))
        self.num_empty += found.num_empty
        self.num_bad += len(bad)
        self._place, self._done_bytes = chunk.end, chunk.done_bytes

    def _write_note(self) -> None:
        value = {
            "place": (self._place.file, self._place.offset, self._place.record),
            "done_bytes": self._done_bytes,
            "num_empty": self.num_empty,
            "num_bad": self.num_bad,
            "is_done": self.is_done,
        }
        with writing():
            marks = {name: mark_json(spool.sync()) for name, spool in self._spools.items()}
            self._journal.note(self._note, {**value, "marks": marks})


def _map_rows(folder: Path) -> npt.NDArray[Any]:
    path = folder / "survey.rows"
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=SURVEY_ROW)
    return np.memmap(path, dtype=SURVEY_ROW, mode="r")


def _sha256_of(digests: npt.NDArray[np.uint8], *, kept: npt.NDArray[np.bool_]) -> str:
    hash_ = hashlib.sha256()
    for first in range(0, len(digests), _ROWS_AT_ONCE):
        here = slice(first, first + _ROWS_AT_ONCE)
        hash_.update(digests[here][kept[here]].tobytes())
    return hash_.hexdigest()
