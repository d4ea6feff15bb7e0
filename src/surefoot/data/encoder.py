"""What the second pass does with one chunk: the documents that stay become tokens, and a row each for the files beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError
from surefoot.data.documents import BadRecord, Document
from surefoot.data.manifest import dtype_for, stored_dtype
from surefoot.data.parts import Chunk, Place
from surefoot.data.quality.minhash import signatures
from surefoot.data.reader import Corpus, Reader, is_empty
from surefoot.data.stored_rows import ROW
from surefoot.data.survey import HELD_OUT, LEFT_OUT, TRAINED_ON, Survey
from surefoot.data.tokenizer import Tokenizer

_BATCH_CHARACTERS: Final = 1 << 18  # the tokenizer keeps some 100 bytes a token while a batch lasts
SPLIT_OF_FATE: Final = {TRAINED_ON: "train", HELD_OUT: "heldout"}


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """A chunk with what the survey said of its documents: what becomes of each, and the sha256 over their hashes."""

    chunk: Chunk
    fates: bytes
    digests_sha256: bytes


def encode_items(corpus: Corpus, *, survey: Survey, first_chunk: int = 0, start: Place | None = None) -> Iterator[EncodeItem]:
    """The chunks that were surveyed, from `first_chunk` on, which begins at `start`. Raises DataError when there are others now."""
    row = int(survey.chunk_rows[:first_chunk].sum())
    num_chunks = first_chunk
    for chunk in corpus.cutting.chunks(corpus.files, start=start):
        if num_chunks >= len(survey.chunk_rows):
            raise input_changed(corpus.source)
        end = row + int(survey.chunk_rows[num_chunks])
        digests = hashlib.sha256(survey.rows["digest"][row:end].tobytes()).digest()
        yield EncodeItem(chunk, survey.fates[row:end].tobytes(), digests)
        row, num_chunks = end, num_chunks + 1
    if num_chunks != len(survey.chunk_rows):
        raise input_changed(corpus.source)


@dataclass(frozen=True, slots=True)
class Stored:
    """Documents in order: their tokens in one piece, and a row each."""

    tokens: npt.NDArray[Any]
    rows: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Raises DataError when a chunk is not what the survey read, and when the tokenizer makes EOS from text."""

    reader: Reader
    tokenizer_json: bytes

    def __call__(self, item: EncodeItem) -> dict[str, Stored]:
        documents = self._documents(item)
        return {split: self._store([one for one in documents if one.fate == fate]) for fate, split in SPLIT_OF_FATE.items()}

    def _documents(self, item: EncodeItem) -> list[_Kept]:
        found = [
            (number, record)
            for number, record in self.reader.records(item.chunk)
            if not isinstance(record, BadRecord) and not is_empty(record)
        ]
        digests = [document.sha256 for _, document in found]
        if len(found) != len(item.fates) or hashlib.sha256(b"".join(digests)).digest() != item.digests_sha256:
            raise input_changed(self.reader.source)
        return [
            _Kept(document, number, digest, fate)
            for (number, document), digest, fate in zip(found, digests, item.fates, strict=True)
            if fate != LEFT_OUT
        ]

    def _store(self, documents: list[_Kept]) -> Stored:
        codec = _codec(self.tokenizer_json)
        dtype = stored_dtype(dtype_for(codec.vocab_size))
        token_arrays: list[npt.NDArray[Any]] = []
        for batch in _batches(documents):
            for one, ids in zip(batch, codec.encode_batch([one.document.text for one in batch]), strict=True):
                _check_ids(ids, document=one.document, codec=codec)
                token_arrays.append(np.array([*ids, codec.eos_id], dtype=dtype))
        return Stored(np.concatenate(token_arrays) if token_arrays else np.empty(0, dtype=dtype), _rows(documents, token_arrays))


@dataclass(frozen=True, slots=True)
class _Kept:
    document: Document
    file: int
    digest: bytes
    fate: int


class InputChanged(DataError):
    """The survey is of another input: nothing that follows from it is of use."""


def input_changed(source: str) -> InputChanged:
    hint = "prepare again when nothing writes to the input"
    return InputChanged("the input changed while it was read", where=f"source {source!r}", hint=hint)


def _rows(documents: Sequence[_Kept], token_arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    rows = np.zeros(len(documents), dtype=ROW)
    if documents:
        rows["hash"] = np.frombuffer(b"".join(one.digest[:16] for one in documents), dtype=np.uint8).reshape(-1, 16)
        rows["file"] = [one.file for one in documents]
        rows["record"] = [one.document.record for one in documents]
        rows["offset"] = [one.document.byte_offset for one in documents]
        rows["length"] = [one.document.byte_length for one in documents]
        rows["tokens"] = [len(tokens) for tokens in token_arrays]
        rows["text_bytes"] = [len(one.document.text.encode()) for one in documents]
        rows["signature"] = signatures(token_arrays)
    return rows


def _batches(documents: Sequence[_Kept]) -> Iterator[list[_Kept]]:
    batch: list[_Kept] = []
    num_characters = 0
    for one in documents:
        batch.append(one)
        num_characters += len(one.document.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _check_ids(ids: Sequence[int], *, document: Document, codec: Tokenizer) -> None:
    where = f"{document.file}:{document.record}"
    if codec.eos_id in ids:
        raise DataError(
            f"the tokenizer makes the EOS token {codec.eos_id} from plain text",
            where=where,
            hint="documents could not be told apart: use a tokenizer whose EOS is a special token",
        )
    if ids and max(ids) >= codec.vocab_size:
        hint = "no model has a row for it: its file is damaged, or was put together from two"
        raise DataError(f"the tokenizer makes the id {max(ids)}, its vocabulary ends at {codec.vocab_size}", where=where, hint=hint)


@lru_cache(maxsize=1)
def _codec(json_bytes: bytes) -> Tokenizer:
    return Tokenizer(json_bytes)
