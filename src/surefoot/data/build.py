"""Writing a prepared data folder: the tokenizer, every document as tokens in its split, the rejects, and the manifest last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from surefoot.core.durable import write_atomic
from surefoot.core.errors import DataError
from surefoot.core.strict_json import canonical, dumps
from surefoot.core.version import __version__
from surefoot.data.documents import Document, Tally
from surefoot.data.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_NAME,
    Manifest,
    SourceEntry,
    SplitEntry,
    TokenizerEntry,
    dtype_for,
    stored_dtype,
)
from surefoot.data.publish import writing
from surefoot.data.shard_writer import SplitWriter
from surefoot.data.survey import Corpus, Progress, Survey
from surefoot.data.tokenizer import Tokenizer

_BATCH_CHARACTERS: Final = 1 << 20


def training_texts(corpus: Corpus, *, survey: Survey, progress: Callable[[Progress], None]) -> Iterator[str]:
    """What a tokenizer is trained on: held-out documents have no say in it."""
    tally = Tally()
    for document, digest in corpus.documents(tally=tally):
        if not survey.is_heldout(digest):
            yield document.text
        progress(Progress("training tokenizer", tally.text_bytes, survey.text_bytes))


def build(folder: Path, *, corpus: Corpus, survey: Survey, codec: Tokenizer, recipe: str, progress: Callable[[Progress], None]) -> Manifest:
    """Fill the empty `folder`; same input, same bytes. Raises Unwritable, and DataError when the input changed since the survey."""
    tally = Tally()
    splits = _write_splits(folder / corpus.source, corpus=corpus, survey=survey, codec=codec, tally=tally, progress=progress)
    if tally.documents_sha256 != survey.documents_sha256:
        hint = "prepare again when nothing writes to the input"
        raise DataError("the input changed while it was read", where=f"source {corpus.source!r}", hint=hint)
    source = SourceEntry(
        documents_sha256=survey.documents_sha256,
        bad_records=len(tally.bad_records),
        duplicates=tally.num_duplicates,
        empty=tally.num_empty,
        splits=splits,
    )
    manifest = Manifest(
        tool_version=__version__,
        tokenizer=TokenizerEntry(recipe=recipe, sha256=codec.sha256, eos_id=codec.eos_id, vocab_size=codec.vocab_size),
        dtype=dtype_for(codec.vocab_size),
        heldout_fraction=survey.heldout_fraction,
        sources={corpus.source: source},
    )
    with writing():
        write_atomic(folder / corpus.source / "rejects.jsonl", b"".join(canonical(bad) + b"\n" for bad in tally.bad_records))
        write_atomic(folder / TOKENIZER_NAME, codec.json_bytes)
        write_atomic(folder / MANIFEST_NAME, dumps(manifest.as_json(), indent=1) + "\n")
    return manifest


def _write_splits(
    folder: Path, *, corpus: Corpus, survey: Survey, codec: Tokenizer, tally: Tally, progress: Callable[[Progress], None]
) -> dict[str, SplitEntry]:
    dtype = stored_dtype(dtype_for(codec.vocab_size))
    with writing():
        writers = {str(split): SplitWriter(folder / split, dtype=dtype) for split in SPLITS}
    try:
        for batch in _batches(corpus.documents(tally=tally)):
            token_lists = codec.encode_batch([document.text for document, _ in batch])
            with writing():
                for (document, digest), ids in zip(batch, token_lists, strict=True):
                    _refuse_stray_eos(ids, document=document, eos_id=codec.eos_id)
                    writer = writers["heldout" if survey.is_heldout(digest) else "train"]
                    writer.add(document, token_ids=np.array([*ids, codec.eos_id], dtype=dtype), digest=digest)
            progress(Progress("tokenizing", tally.text_bytes, survey.text_bytes))
        with writing():
            return {split: writer.finish() for split, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise


def _batches(documents: Iterator[tuple[Document, bytes]]) -> Iterator[list[tuple[Document, bytes]]]:
    batch: list[tuple[Document, bytes]] = []
    num_characters = 0
    for document, digest in documents:
        batch.append((document, digest))
        num_characters += len(document.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _refuse_stray_eos(ids: Sequence[int], *, document: Document, eos_id: int) -> None:
    if eos_id in ids:
        raise DataError(
            f"the tokenizer makes the EOS token {eos_id} from plain text",
            where=f"{document.file}:{document.record}",
            hint="documents could not be told apart: use a tokenizer whose EOS is a special token",
        )
