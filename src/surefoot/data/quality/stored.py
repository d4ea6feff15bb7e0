"""Stored documents as text again, a bounded number of them: some of each source spread over its whole stream, or those in given spans."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import TokenSpan
from surefoot.core.hashing import key64
from surefoot.data.manifest import TOKENIZER_NAME, Manifest, ShardEntry, Split, load_manifest
from surefoot.data.provenance import Provenance, StoredDocument
from surefoot.data.shards import TokenStore
from surefoot.data.tokenizer import Tokenizer, load_tokenizer

MAX_DOCUMENT_TOKENS: Final = 1 << 18
"""Of a longer document so many tokens are looked at: about a megabyte of text."""
_EXCERPT_CHARACTERS: Final = 160


@dataclass(frozen=True, slots=True)
class StoredText:
    """A document with its tokens (EOS included) and its text. `is_cut`: it is longer, and this is its beginning."""

    document: StoredDocument
    tokens: npt.NDArray[Any]
    text: str
    is_cut: bool


class Shelf:
    """The documents of one split of a prepared folder. Holds no more than one document and what provenance keeps open.

    What fills up a shard that was made anew has a number like a document, and is none: it is neither sampled nor found in spans.
    """

    def __init__(self, path: str | Path, *, manifest: Manifest | None = None, split: Split = "train") -> None:
        self.path = Path(path)
        self.manifest = manifest or load_manifest(path)
        self.split = split
        self.provenance = Provenance(path, manifest=self.manifest, split=split)
        self._stores: dict[str, TokenStore] = {}

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.provenance.close()
        while self._stores:
            self._stores.popitem()[1].close()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / TOKENIZER_NAME)

    def num_documents(self, source: str) -> int:
        """How many numbers there are: with what fills up shards."""
        return self.manifest.split(source, self.split).docs

    def padded_tokens(self, source: str) -> dict[str, int]:
        """By shard: how many tokens at its end fill it up, where there are any. They have the last number of the shard."""
        here = {shard.name for shard in self.manifest.split(source, self.split).shards} if self.split == "train" else set()
        made = (shard for shard in self.manifest.replaced if shard.source == source)
        return {shard.by: shard.padded_tokens for shard in made if shard.padded_tokens and shard.by in here}

    def whole_documents(self, source: str, shard: ShardEntry) -> int:
        """How many documents a shard of `source` holds, without what fills it up."""
        return shard.docs - (shard.name in self.padded_tokens(source))

    def document(self, source: str, number: int) -> StoredDocument:
        return self.provenance.find(f"{source}/{number}")[0]

    def read(self, document: StoredDocument) -> StoredText:
        """Raises DataError where a block on disk is not what was written."""
        tokens = self.beginning(document)
        return StoredText(document, tokens, self.tokenizer.decode(tokens.tolist()), is_cut=len(tokens) < document.end - document.start)

    def beginning(self, document: StoredDocument) -> npt.NDArray[Any]:
        """Its tokens, of a very long one the first `MAX_DOCUMENT_TOKENS`."""
        end = min(document.end, document.start + MAX_DOCUMENT_TOKENS)
        return self.tokens(TokenSpan(document.source, document.start, end))

    def tokens(self, span: TokenSpan) -> npt.NDArray[Any]:
        if span.source not in self._stores:
            self._stores[span.source] = TokenStore(self.path, source=span.source, split=self.split, manifest=self.manifest)
        return self._stores[span.source].read(span.start, span.end - span.start)

    def sample(self, source: str, *, limit: int, purpose: str = "report") -> Iterator[StoredText]:
        """At most `limit` documents of `source`, in stream order: see `spread`."""
        for document in self.some(source, limit=limit, key=f"{purpose}/{source}"):
            yield self.read(document)

    def some(self, source: str, *, limit: int, key: str) -> Iterator[StoredDocument]:
        """At most `limit` documents of `source`, in stream order, without their text."""
        for number in spread(self.num_documents(source), limit=limit, key=key).tolist():
            if not is_padding(document := self.document(source, number)):
                yield document

    def in_spans(self, spans: Iterable[TokenSpan]) -> dict[StoredDocument, list[TokenSpan]]:
        """The documents that hold a token of `spans`, each with the parts of it that lie there."""
        found: dict[StoredDocument, list[TokenSpan]] = {}
        for span in spans:
            for document in self.provenance.documents(span):
                if is_padding(document):
                    continue
                part = TokenSpan(span.source, max(span.start, document.start), min(span.end, document.end))
                found.setdefault(document, []).append(part)
        return found

    def lengths(self, source: str, *, limit: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(numbers, tokens) of documents of `source`: all of them, or about `limit` in whole blocks of 1,024 spread over the stream."""
        entry = self.manifest.split(source, self.split)
        num_blocks = [-(-shard.docs // _LENGTHS_READ) for shard in entry.shards]
        chosen = spread(sum(num_blocks), limit=max(1, limit // _LENGTHS_READ), key=f"lengths/{source}")
        numbers, lengths = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        first_block, first_doc = 0, 0
        for shard, blocks in zip(entry.shards, num_blocks, strict=True):
            here = chosen[(chosen >= first_block) & (chosen < first_block + blocks)] - first_block
            for first, counts in _read_lengths(self.path / source / self.split / f"{shard.name}.len", here, num_docs=shard.docs):
                counts = counts[: self.whole_documents(source, shard) - first]
                numbers.append(np.arange(counts.size, dtype=np.int64) + first_doc + first)
                lengths.append(counts)
            first_block, first_doc = first_block + blocks, first_doc + shard.docs
        return np.concatenate(numbers), np.concatenate(lengths)


_LENGTHS_READ: Final = 1024


def spread(count: int, *, limit: int, key: str) -> npt.NDArray[np.int64]:
    """At most `limit` of range(count), ascending: one of each equal stretch, by a key, so that no period of the data meets a stride."""
    if count <= limit:
        return np.arange(count, dtype=np.int64)
    edges = np.linspace(0, count, limit + 1).astype(np.int64)
    draws = np.random.Generator(np.random.PCG64(key64("spread", key))).random(limit)
    return edges[:-1] + (draws * np.diff(edges)).astype(np.int64)


def is_padding(document: StoredDocument) -> bool:
    """Whether it is the EOS tokens that fill a shard up: of no file, and its record is none."""
    return document.record == 0


def excerpt(text: str, *, limit: int = _EXCERPT_CHARACTERS) -> str:
    """The beginning of `text` in one line, what cannot be shown as dots."""
    line = " ".join(text[: 4 * limit].split())
    shown = "".join(character if character.isprintable() else "\u00b7" for character in line[:limit])
    return shown + ("\u2026" if len(line) > limit else "")


def told(document: StoredDocument) -> dict[str, Any]:
    """Where a document is, by the names that all answers use."""
    return {
        "document": document.id,
        "hash": document.hash,
        "source": document.source,
        "file": document.file,
        "record": document.record,
        "offset": document.byte_offset,
        "tokens": document.end - document.start,
    }


def _read_lengths(
    path: Path, blocks: Sequence[int] | npt.NDArray[np.int64], *, num_docs: int
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(first document of the shard, tokens of its documents) for each of `blocks`."""
    if not len(blocks):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for block in np.asarray(blocks).tolist():
            first = block * _LENGTHS_READ
            count = min(_LENGTHS_READ, num_docs - first)
            yield first, np.frombuffer(os.pread(descriptor, 4 * count, 4 * first), dtype="<u4").astype(np.int64)
    finally:
        os.close(descriptor)
