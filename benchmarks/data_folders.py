"""Prepared folders as large as one likes that take little disk: what is alike in two shards is one file.

Every token is 0, but for the EOS of documents where shards have the files beside the tokens; without these, tokens are holes. Headers,
sizes, checksums and the files beside the tokens are what the real writer makes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
_TOKENS_AT_ONCE: Final = 1 << 22  # whole blocks
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
        for piece in _tokens(rows, shard_tokens) if rows is not None else ():
            file.write(piece)
        file.truncate(HEADER_BYTES + 2 * shard_tokens)
    beside = {"sum": _sums_of_zeros(2 * shard_tokens) if rows is None else b"".join(map(_sums, _tokens(rows, shard_tokens)))}
    return _write_beside(base, beside if rows is None else {**beside, **_side_files(rows)})


def _tokens(rows: Rows, shard_tokens: int) -> Iterator[bytes]:
    ends = np.cumsum(rows["tokens"], dtype=np.int64) - 1
    for first in range(0, shard_tokens, _TOKENS_AT_ONCE):
        piece = np.zeros(min(_TOKENS_AT_ONCE, shard_tokens - first), dtype=stored_dtype("u16"))
        piece[ends[(ends >= first) & (ends < first + piece.size)] - first] = EOS
        yield piece.tobytes()


def _side_files(rows: Rows) -> dict[str, bytes]:
    origins = origins_file(rows, files=["corpus/web.jsonl"])
    return {"len": lengths_file(rows), "idx": index_file(rows), "sig": signatures_file(rows), "src.parquet": origins}


def _write_beside(base: Path, beside: dict[str, bytes]) -> dict[str, FileEntry]:
    for kind, data in beside.items():
        base.with_suffix(f".{kind}").write_bytes(data)
    return {kind: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for kind, data in beside.items()}


def _sums(tokens: bytes) -> bytes:
    digests = [xxhash.xxh3_64_intdigest(tokens[begin : begin + BLOCK_BYTES]) for begin in range(0, len(tokens), BLOCK_BYTES)]
    return np.array(digests, dtype="<u8").tobytes()


def _sums_of_zeros(num_token_bytes: int) -> bytes:
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
    beside = _side_files(rows)
    for kind in beside:
        base.with_suffix(f".{kind}").unlink()
    return replace(entry, files={**entry.files, **_write_beside(base, beside)})
