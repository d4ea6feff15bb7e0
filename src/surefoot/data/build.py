"""The second pass: every document that stays as tokens in its split, what was rejected, and the entry of the source in the manifest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

from surefoot.core.durable import fsync_dir
from surefoot.core.strict_json import canonical
from surefoot.data.crew import Crew
from surefoot.data.documents import BadRecord
from surefoot.data.encoder import Encoder, Stored, encode_items, input_changed
from surefoot.data.journal import Journal
from surefoot.data.manifest import SPLITS, SourceEntry, dtype_for, stored_dtype
from surefoot.data.parts import Place
from surefoot.data.publish import writing
from surefoot.data.reader import Corpus, is_empty
from surefoot.data.shard_writer import SHARD_BYTES, SplitWriter, split_state
from surefoot.data.survey import CHUNKS_PER_NOTE, TRAINED_ON, Progress, Survey
from surefoot.data.tokenizer import Tokenizer

REJECTS_NAME = "rejects.jsonl"


def training_texts(corpus: Corpus, *, survey: Survey) -> Iterator[str]:
    """What a tokenizer is trained on: held-out documents have no say in it."""
    row = 0
    for chunk in corpus.cutting.chunks(corpus.files):
        for _, record in corpus.reader.records(chunk):
            if isinstance(record, BadRecord) or is_empty(record):
                continue
            if row >= len(survey.fates):
                raise input_changed(corpus.source)
            if survey.fates[row] == TRAINED_ON:
                yield record.text
            row += 1


def build_source(
    corpus: Corpus,
    *,
    survey: Survey,
    codec: Tokenizer,
    journal: Journal,
    crew: Crew,
    progress: Callable[[Progress], None],
    shard_bytes: int = SHARD_BYTES,
) -> SourceEntry:
    """Write the shards of one source; same input, same bytes, however many processes and interruptions.

    Raises Unwritable, Damaged, and DataError when the input changed since the survey.
    """
    with closing(_Pass(corpus, survey=survey, codec=codec, journal=journal, shard_bytes=shard_bytes)) as pass_:
        pass_.run(crew, progress=progress)
        with writing():
            splits = {split: writer.finish() for split, writer in pass_.writers.items()}
            rejected = _write_rejects(journal, corpus=corpus, survey=survey)
    return SourceEntry(
        documents_sha256=survey.documents_sha256,
        bad_records=rejected.pop("", 0),
        duplicates=survey.num_duplicates,
        empty=survey.num_empty,
        splits=splits,
        rejected=dict(sorted(rejected.items())),
        heldout_below=f"{survey.heldout_limit:064x}",
    )


class _Pass:
    """The writing itself, and how far it is noted."""

    def __init__(self, corpus: Corpus, *, survey: Survey, codec: Tokenizer, journal: Journal, shard_bytes: int) -> None:
        self._corpus, self._survey, self._codec, self._journal = corpus, survey, codec, journal
        self._note = f"{corpus.source}/written"
        noted = journal.read(self._note) or {}
        self._place = Place(*noted.get("place", ()))
        self._first_chunk: int = noted.get("num_chunks", 0)
        self._done_bytes: int = noted.get("done_bytes", 0)
        states: Mapping[str, Any] = noted.get("splits", {})
        self.writers: dict[str, SplitWriter] = {}
        try:
            with writing():
                for split in SPLITS:
                    self.writers[split] = SplitWriter(
                        journal.data / corpus.source / split,
                        dtype=stored_dtype(dtype_for(codec.vocab_size)),
                        files=corpus.reader.files,
                        work=journal.work / corpus.source / split,
                        shard_bytes=shard_bytes,
                        state=split_state(states[split]) if split in states else None,
                    )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for writer in self.writers.values():
            writer.abandon()

    def run(self, crew: Crew, *, progress: Callable[[Progress], None]) -> None:
        total_bytes = self._survey.text_bytes
        progress(Progress("tokenizing", self._done_bytes, total_bytes))
        num_chunks = self._first_chunk
        items = encode_items(self._corpus, survey=self._survey, first_chunk=self._first_chunk, start=self._place)
        for item, stored in crew.map(Encoder(self._corpus.reader, self._codec.json_bytes), items):
            num_chunks += 1
            with writing():
                self._add(stored)
                if (num_chunks - self._first_chunk) % CHUNKS_PER_NOTE == 0:
                    self._write_note(num_chunks, place=item.chunk.end)
            progress(Progress("tokenizing", self._done_bytes, total_bytes))

    def _add(self, stored: Mapping[str, Stored]) -> None:
        for split, documents in stored.items():
            self.writers[split].extend(documents.tokens, documents.rows)
            self._done_bytes += int(documents.rows["text_bytes"].sum())

    def _write_note(self, num_chunks: int, *, place: Place) -> None:
        value = {
            "place": (place.file, place.offset, place.record),
            "num_chunks": num_chunks,
            "done_bytes": self._done_bytes,
            "splits": {split: writer.sync().as_json() for split, writer in self.writers.items()},
        }
        self._journal.note(self._note, value)
        for writer in self.writers.values():
            writer.forget()


def _write_rejects(journal: Journal, *, corpus: Corpus, survey: Survey) -> Counter[str]:
    """List what was rejected; how often, by rule, and bad records under the empty name."""
    counts: Counter[str] = Counter()
    folder = journal.data / corpus.source
    with (folder / REJECTS_NAME).open("wb") as file:
        for reject in survey.rejects():
            counts[reject.get("rule", "")] += 1
            file.write(canonical(reject) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fsync_dir(folder)
    return counts
