"""Prepared folders of random tokens, written by the real writer: for tests of what reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from surefoot.core.strict_json import dumps
from surefoot.data.documents import Document
from surefoot.data.manifest import MANIFEST_NAME, Manifest, SourceEntry, SplitEntry, TokenizerEntry, dtype_for, stored_dtype
from surefoot.data.shard_writer import SplitWriter
from surefoot.data.shards import TokenStore

EOS = 3
LENGTHS = (900, 1, 20_000, 5, 7_000, 12_000, 2, 40_000)


def documents_of(vocab_size: int, lengths: tuple[int, ...]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    rng = np.random.default_rng(0)
    return [np.append(rng.integers(EOS + 1, vocab_size, size=length), EOS) for length in lengths]


def write_store(
    path: Path, *, vocab_size: int = 60_000, shard_bytes: int = 1 << 30, lengths: tuple[int, ...] = LENGTHS
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A folder of one source with its manifest; returns the stream that it holds."""
    writer = SplitWriter(path / "text" / "train", dtype=stored_dtype(dtype_for(vocab_size)), shard_bytes=shard_bytes)
    documents = documents_of(vocab_size, lengths)
    for number, ids in enumerate(documents):
        document = Document(f"text {number}", "text", f"f{number % 3}.jsonl", number + 1, 10 * number, 9)
        writer.add(document, token_ids=ids, digest=document.sha256)
    empty = SplitEntry(shards=(), tokens=0, docs=0, text_bytes=0)
    source = SourceEntry("", 0, 0, 0, splits={"train": writer.finish(), "heldout": empty})
    manifest = Manifest("0", TokenizerEntry("bytes", "0" * 64, EOS, vocab_size), dtype_for(vocab_size), 0.0, {"text": source})
    (path / MANIFEST_NAME).write_text(dumps(manifest.as_json()))
    return np.concatenate(documents)


def open_store(path: Path) -> TokenStore:
    return TokenStore(path, source="text", split="train")
