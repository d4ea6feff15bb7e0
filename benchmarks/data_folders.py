"""Prepared folders as large as one likes that take next to no disk: tokens are holes, and what is alike in two shards is one file.

Every token is 0, so a block's checksum is known without reading it. Headers, sizes, checksums and the files beside the tokens are what
the real writer makes; documents end where their lengths say, though no EOS stands there.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from surefoot.core.strict_json import dumps
from surefoot.data.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ShardEntry,
    SourceEntry,
    SplitEntry,
    TokenizerEntry,
    stored_dtype,
)
from surefoot.data.shards import BLOCK_BYTES, HEADER_BYTES, pack_header
from surefoot.data.stored_rows import ROW, Rows, index_file, lengths_file, origins_file, signatures_file

SOURCE: Final = "web"
EOS: Final = 3
VOCAB_SIZE: Final = 50_000
DOC_TOKENS: Final = 1_000
_LINK_LIMIT: Final = 60_000  # ext4 allows 65,000 names of one file


@dataclass(frozen=True)
class Marked:
    """One document that is in one shard only, among shards that are all alike."""

    shard: int
    document: int
    hash: str


def sparse_folder(
    path: Path, *, num_shards: int, shard_tokens: int, num_distinct: int = 0, marked_shard: int | None = None
) -> Marked | None:
    """Write the folder at `path`, unless it is there. The first `num_distinct` shards are files of their own, the others names of one.

    With `marked_shard`, shards have the files beside the tokens, and that one holds a document that no other has, which is returned.
    """
    train = path / SOURCE / "train"
    rows = _rows(shard_tokens, seed=0) if marked_shard is not None else None
    marked = _mark(rows, shard=marked_shard) if rows is not None and marked_shard is not None else None
    if not (path / MANIFEST_NAME).exists():
        train.mkdir(parents=True, exist_ok=True)
        num_docs = -(-shard_tokens // DOC_TOKENS)
        files = _write_shard(train / "alike", shard_tokens=shard_tokens, num_docs=num_docs, rows=rows)
        entries = []
        for number in range(num_shards):
            own = number < num_distinct
            _name_shard(train, number, shard_tokens=shard_tokens, num_docs=num_docs, kinds=list(files), own=own)
            entries.append(ShardEntry(f"{number:05d}", shard_tokens, num_docs, HEADER_BYTES + 2 * shard_tokens, "0" * 64, files))
        if marked is not None and rows is not None:
            entries[marked.shard] = _write_marked(train, rows, marked, entries[marked.shard])
        _write_manifest(path, entries)
    return marked


def _write_manifest(path: Path, entries: list[ShardEntry]) -> None:
    tokens, docs = sum(entry.tokens for entry in entries), sum(entry.docs for entry in entries)
    splits = {"train": SplitEntry(tuple(entries), tokens, docs, 4 * tokens), "heldout": SplitEntry((), 0, 0, 0)}
    source = SourceEntry("0" * 64, 0, 0, 0, splits=splits)
    manifest = Manifest("0", TokenizerEntry("bytes", "0" * 64, EOS, VOCAB_SIZE), "u16", 0.0, {SOURCE: source})
    (path / MANIFEST_NAME).write_text(dumps(manifest.as_json()))


def _rows(shard_tokens: int, *, seed: int) -> Rows:
    num_docs = -(-shard_tokens // DOC_TOKENS)
    rows = np.zeros(num_docs, dtype=ROW)
    rows["hash"] = np.random.default_rng(seed).integers(0, 256, size=(num_docs, 16), dtype=np.uint8)
    rows["record"] = np.arange(num_docs)
    rows["offset"], rows["length"] = np.arange(num_docs) * 5000, 4999
    rows["tokens"] = DOC_TOKENS
    rows["tokens"][-1] = shard_tokens - (num_docs - 1) * DOC_TOKENS
    return rows


def _mark(rows: Rows, *, shard: int) -> Marked:
    document = len(rows) // 3
    return Marked(shard, document, hashlib.sha256(b"the marked document").hexdigest()[:32])


def _write_shard(base: Path, *, shard_tokens: int, num_docs: int, rows: Rows | None) -> dict[str, FileEntry]:
    """`<base>.tok` and what stands beside it; what the manifest says of the latter."""
    with base.with_suffix(".tok").open("wb") as file:
        file.write(pack_header(token_bytes=stored_dtype("u16").itemsize, num_tokens=shard_tokens, num_docs=num_docs))
        file.truncate(HEADER_BYTES + 2 * shard_tokens)
    beside = {"sum": _sums(2 * shard_tokens)}
    if rows is not None:
        beside |= {"len": lengths_file(rows), "idx": index_file(rows), "sig": signatures_file(rows)}
        beside["src.parquet"] = origins_file(rows, files=["corpus/web.jsonl"])
    for kind, data in beside.items():
        base.with_suffix(f".{kind}").write_bytes(data)
    return {kind: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for kind, data in beside.items()}


def _sums(num_token_bytes: int) -> bytes:
    whole, rest = divmod(num_token_bytes, BLOCK_BYTES)
    sums = [xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES))] * whole + ([xxhash.xxh3_64_intdigest(bytes(rest))] if rest else [])
    return np.array(sums, dtype="<u8").tobytes()


def _name_shard(train: Path, number: int, *, shard_tokens: int, num_docs: int, kinds: list[str], own: bool) -> None:
    if own:
        _write_shard(train / f"{number:05d}", shard_tokens=shard_tokens, num_docs=num_docs, rows=None)
        return
    if number >= _LINK_LIMIT:
        raise ValueError(f"{number} names of one file")
    for kind in ("tok", *kinds):
        os.link(train / f"alike.{kind}", train / f"{number:05d}.{kind}")


def _write_marked(train: Path, rows: Rows, marked: Marked, entry: ShardEntry) -> ShardEntry:
    rows = rows.copy()
    rows["hash"][marked.document] = np.frombuffer(bytes.fromhex(marked.hash), dtype=np.uint8)
    base = train / f"{marked.shard:05d}"
    for kind in ("tok", *entry.files):
        base.with_suffix(f".{kind}").unlink()
    files = _write_shard(base, shard_tokens=entry.tokens, num_docs=entry.docs, rows=rows)
    return ShardEntry(entry.name, entry.tokens, entry.docs, entry.bytes, entry.sha256, files)
