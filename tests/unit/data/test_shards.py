from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash

from surefoot.core.errors import DataError
from surefoot.data.documents import Document
from surefoot.data.manifest import (
    MANIFEST_NAME,
    load_manifest,
    stored_dtype,
)
from surefoot.data.shard_writer import SplitWriter
from surefoot.data.shards import BLOCK_BYTES, HEADER_BYTES, TokenStore
from tests.stores import EOS, LENGTHS, open_store, write_store


@pytest.mark.parametrize("vocab_size", [60_000, 200_000])
@pytest.mark.parametrize("shard_bytes", [1, 30_000, 1 << 30])
def test_the_stream_reads_as_written_across_shards(tmp_path: Path, vocab_size: int, shard_bytes: int) -> None:
    stream = write_store(tmp_path, vocab_size=vocab_size, shard_bytes=shard_bytes)
    store = open_store(tmp_path)
    assert store.num_tokens == len(stream)
    assert np.array_equal(store.read(0, len(stream)), stream)
    rng = np.random.default_rng(1)
    for start in rng.integers(0, len(stream), size=200).tolist():
        count = int(rng.integers(0, min(20_000, len(stream) - start) + 1))
        assert np.array_equal(store.read(start, count), stream[start : start + count])
    store.close()


def test_documents_start_where_they_were_written(tmp_path: Path) -> None:
    stream = write_store(tmp_path, shard_bytes=30_000)
    store = open_store(tmp_path)
    starts = np.concatenate([[0], np.flatnonzero(stream == EOS)[:-1] + 1])
    assert store.document_starts(0, len(stream)).tolist() == starts.tolist()
    for start, count in ((0, 1), (0, 0), (901, 1), (900, 3), (902, 30_000), (903, 10), (len(stream) - 1, 1)):
        assert store.document_starts(start, count).tolist() == [one for one in starts.tolist() if start <= one < start + count]
    store.close()


def test_outside_the_stream_is_refused(tmp_path: Path) -> None:
    stream = write_store(tmp_path)
    store = open_store(tmp_path)
    for start, count in ((-1, 2), (len(stream), 1), (0, len(stream) + 1)):
        with pytest.raises(ValueError, match="outside a stream"):
            store.read(start, count)
    store.close()


def test_a_flipped_bit_is_named_at_the_read_that_touches_it_and_only_there(tmp_path: Path) -> None:
    stream = write_store(tmp_path)
    path = tmp_path / "text" / "train" / "00000.tok"
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 2 * BLOCK_BYTES + 100] ^= 4
    path.write_bytes(data)
    store = open_store(tmp_path)
    per_block = BLOCK_BYTES // 2
    assert np.array_equal(store.read(0, 2 * per_block), stream[: 2 * per_block])
    assert np.array_equal(store.read(3 * per_block, per_block), stream[3 * per_block : 4 * per_block])
    with pytest.raises(DataError, match="needed for sample 77") as caught:
        store.read(2 * per_block - 1, 2, sample=77)
    block = data[HEADER_BYTES + 2 * BLOCK_BYTES : HEADER_BYTES + 3 * BLOCK_BYTES]
    values = caught.value.values
    assert (values["shard"], values["split"]) == ("text/00000", "train")
    assert (values["block"], values["offset"]) == (2, HEADER_BYTES + 2 * BLOCK_BYTES)
    assert "surefoot data block RUN --shard text/00000" in str(caught.value)
    assert values["got"] == xxhash.xxh3_64_hexdigest(bytes(block))
    assert values["wanted"] != values["got"]
    store.close()


def test_every_byte_of_tokens_is_covered(tmp_path: Path) -> None:
    stream = write_store(tmp_path)
    path = tmp_path / "text" / "train" / "00000.tok"
    whole = path.read_bytes()
    for offset in (HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES, len(whole) - 1):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        store = open_store(tmp_path)
        with pytest.raises(DataError, match="has checksum"):
            store.read(0, len(stream))
        store.close()


@pytest.mark.parametrize("damage", ["truncate", "lengthen", "no tok", "no sum", "short sum", "ragged sum"])
def test_a_shard_that_is_not_that_of_the_manifest_is_refused_at_the_start(tmp_path: Path, damage: str) -> None:
    write_store(tmp_path)
    tok, checksums = (tmp_path / "text" / "train" / f"00000.{suffix}" for suffix in ("tok", "sum"))
    match damage:
        case "truncate":
            os.truncate(tok, tok.stat().st_size - 2)
        case "lengthen":
            os.truncate(tok, tok.stat().st_size + 2)
        case "no tok":
            tok.unlink()
        case "no sum":
            checksums.unlink()
        case "short sum":
            os.truncate(checksums, checksums.stat().st_size - 8)
        case "ragged sum":
            os.truncate(checksums, checksums.stat().st_size - 3)
    store = open_store(tmp_path)
    with pytest.raises(DataError, match="00000"):
        store.check_files()
    assert store.check_files(leave_out={"00000"}) == 0
    with pytest.raises(DataError, match="00000"):
        store.read(0, 1)
    store.close()


def test_the_header_is_checked_when_a_shard_is_touched_first(tmp_path: Path) -> None:
    stream = write_store(tmp_path, shard_bytes=30_000)
    tok = tmp_path / "text" / "train" / "00001.tok"
    tok.write_bytes(b"X" + tok.read_bytes()[1:])
    store = open_store(tmp_path)
    assert store.check_files() == len(store.entry.shards)
    assert np.array_equal(store.read(0, 100), stream[:100])
    with pytest.raises(DataError, match=r"00001.tok: the header"):
        store.read(0, len(stream))
    store.close()


def test_looking_at_the_files_takes_bounded_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_store(tmp_path, shard_bytes=30_000)
    store = open_store(tmp_path)
    assert store.check_files(limit_s=-1.0) == 0
    assert f"0 of {len(store.entry.shards)} shards were looked at" in caplog.text
    store.close()


def test_a_shard_cut_short_while_it_is_open_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    stream = write_store(tmp_path)
    store = open_store(tmp_path)
    store.read(0, 1)
    os.truncate(tmp_path / "text" / "train" / "00000.tok", HEADER_BYTES + BLOCK_BYTES + 10)
    assert np.array_equal(store.read(0, 10), stream[:10])
    with pytest.raises(DataError, match="block 1 at byte"):
        store.read(BLOCK_BYTES // 2, 10)
    store.close()


def test_a_folder_replaced_meanwhile_is_never_mixed_in(tmp_path: Path) -> None:
    write_store(tmp_path / "data", shard_bytes=30_000)
    store = open_store(tmp_path / "data")
    store.read(0, 10)
    (tmp_path / "data").rename(tmp_path / "old")
    write_store(tmp_path / "data", shard_bytes=30_000)
    (tmp_path / "old" / "text" / "train" / "00001.tok").unlink()
    with pytest.raises(DataError, match="cannot open"):
        store.check_files()
    store.close()


def test_files_beside_the_tokens_say_what_they_should(tmp_path: Path) -> None:
    write_store(tmp_path)
    folder = tmp_path / "text" / "train"
    tokens = (folder / "00000.tok").read_bytes()[HEADER_BYTES:]
    sums = [xxhash.xxh3_64_intdigest(tokens[begin : begin + BLOCK_BYTES]) for begin in range(0, len(tokens), BLOCK_BYTES)]
    assert np.frombuffer((folder / "00000.sum").read_bytes(), dtype="<u8").tolist() == sums
    lengths = (folder / "00000.len").read_bytes()
    assert np.frombuffer(lengths, dtype="<u4", count=len(LENGTHS)).tolist() == [length + 1 for length in LENGTHS]
    assert np.frombuffer(lengths, dtype="<u8", offset=4 * len(LENGTHS)).tolist() == [0]
    rows = pq.read_table(folder / "00000.src.parquet").to_pylist()
    assert rows[4] == {
        "doc_hash": hashlib.sha256(b"text 4").digest()[:16],
        "file": "f1.jsonl",
        "record": 5,
        "byte_offset": 40,
        "byte_length": 9,
    }
    entry = load_manifest(tmp_path).sources["text"].splits["train"].shards[0]
    assert entry.sha256 == hashlib.sha256((folder / "00000.tok").read_bytes()).hexdigest()
    assert (entry.docs, entry.tokens, entry.bytes) == (len(LENGTHS), sum(LENGTHS) + len(LENGTHS), HEADER_BYTES + len(tokens))


def test_document_lengths_can_be_entered_in_the_middle(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path / "many", dtype=stored_dtype("u16"))
    for number in range(2500):
        document = Document(f"{number}", "text", "f", number, 0, 1)
        writer.add(document, token_ids=np.array([5] * (number % 7) + [EOS]), digest=document.sha256)
    writer.finish()
    data = (tmp_path / "many" / "00000.len").read_bytes()
    lengths = np.frombuffer(data, dtype="<u4", count=2500)
    assert np.frombuffer(data, dtype="<u8", offset=10_000).tolist() == [int(lengths[:first].sum()) for first in (0, 1024, 2048)]


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path)
    value = json.loads((tmp_path / MANIFEST_NAME).read_text())
    cases: dict[str, dict[str, object]] = {
        "differs from its own hash": {"heldout_fraction": 0.2},
        "format version 9": {"format_version": 9},
        "not a manifest": {"format": "other"},
        "damaged": {"tokenizer": {}},
    }
    for message, change in cases.items():
        (tmp_path / MANIFEST_NAME).write_text(json.dumps({**value, **change}))
        with pytest.raises(DataError, match=message):
            load_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        load_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    with pytest.raises(DataError, match="no prepared data here"):
        load_manifest(tmp_path)


def test_identity_is_content_and_not_the_release_that_wrote_it(tmp_path: Path) -> None:
    write_store(tmp_path)
    manifest = load_manifest(tmp_path)
    value = {**manifest.as_json(), "tool_version": "99"}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(value))
    assert load_manifest(tmp_path).sha256 == manifest.sha256


def test_an_unknown_source_is_named(tmp_path: Path) -> None:
    write_store(tmp_path)
    with pytest.raises(DataError, match="no source 'code'"):
        TokenStore(tmp_path, source="code", split="train")


def test_a_split_without_documents_is_an_empty_stream(tmp_path: Path) -> None:
    write_store(tmp_path)
    store = TokenStore(tmp_path, source="text", split="heldout")
    assert store.num_tokens == 0
    assert store.read(0, 0).size == 0
    store.close()
