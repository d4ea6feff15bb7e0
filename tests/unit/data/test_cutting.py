"""Every kind of file, packed and damaged, cut anywhere: the same records, and each bad one named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.core.errors import DataError
from surefoot.data.corpus import list_files
from surefoot.data.cutting import CHUNK_BYTES, MAX_RECORD_BYTES, Cutting
from surefoot.data.documents import BadRecord, Record
from surefoot.data.parts import Place
from surefoot.data.reader import Reader

TEXTS = [f"text {number} " + "größe " * (number * 7 % 23) for number in range(120)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def pack_zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": pack_zstd}


def records(path: Path, start: Place | None = None, **sizes: int) -> list[tuple[Record, Place]]:
    """Every record, each with the place behind its chunk."""
    files = list_files([path], source="text")
    cutting = Cutting("text", sizes.get("max_record_bytes", MAX_RECORD_BYTES), sizes.get("chunk_bytes", CHUNK_BYTES))
    reader = Reader("text", tuple(file.name for file in files), "text", cutting.max_record_bytes)
    return [(record, chunk.end) for chunk in cutting.chunks(files, start=start) for _, record in reader.records(chunk)]


def all_records(path: Path, **sizes: int) -> list[Record]:
    return [record for record, _ in records(path, None, **sizes)]


def bad_of(path: Path, **settings: int) -> list[BadRecord]:
    return [record for record in all_records(path, **settings) if isinstance(record, BadRecord)]


def texts_of(path: Path, **settings: int) -> list[str]:
    return [record.text for record in all_records(path, **settings) if not isinstance(record, BadRecord)]


def write_parquet(path: Path, values: list[str | None], **settings: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(values)), "text": pa.array(values, pa.string())}), path, **settings)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with a file of each kind; a line that is none and a row without text among them."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for suffix, pack in PACKERS.items():
        (folder / f"lines.jsonl{suffix}").write_bytes(pack(LINES + b"{broken\n" + LINES))
        (folder / f"whole.txt{suffix}").write_bytes(pack("ein größerer Text\n".encode()))
    write_parquet(folder / "rows.parquet", [*TEXTS, None, *TEXTS], row_group_size=50)
    (folder / "zero.jsonl").write_bytes(b"")
    return folder


def test_where_it_is_cut_changes_no_record(corpus: Path) -> None:
    whole = all_records(corpus)
    assert len(whole) == 3 * (2 * len(TEXTS) + 1) + 3 + (2 * len(TEXTS) + 1) + 1
    for chunk_bytes in (1, 1000, 7777, 40_000):
        assert all_records(corpus, chunk_bytes=chunk_bytes) == whole


def goes_on_anywhere(path: Path, **sizes: int) -> int:
    """Assert that from the end of any chunk the same chunks follow, with the same records in them; how many chunks there are."""
    whole = records(path, None, **sizes)
    places = list(dict.fromkeys(end for _, end in whole))
    behind = len(whole)
    for place in reversed(places):
        assert records(path, place, **sizes) == whole[behind:], place
        behind = next(number for number, (_, end) in enumerate(whole) if end == place)
    return len(places)


def test_a_pass_goes_on_at_the_end_of_any_chunk(corpus: Path) -> None:
    (corpus / "torn.jsonl.gz").write_bytes(gzip.compress(LINES)[:-9])
    assert goes_on_anywhere(corpus, chunk_bytes=1500) > 60


@pytest.mark.parametrize("row_group_size", [100, 700, 1000])
def test_row_groups_of_any_size_are_cut_alike_from_any_chunk_on(tmp_path: Path, row_group_size: int) -> None:
    values: list[str | None] = [f"{number} " + "größe " * (number * 7 % 5) for number in range(2500)]
    path = write_parquet(tmp_path / "a.parquet", values, row_group_size=row_group_size)
    assert goes_on_anywhere(path, chunk_bytes=4000) > 8


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_over_long_lines_are_cut_alike_from_any_chunk_on(tmp_path: Path, suffix: str) -> None:
    """Lines of every length around the limit, with the ends of reads, a MiB each, in and between them."""
    lengths = [number * 7919 % 90_000 for number in range(80)]
    lines = b"".join(json.dumps({"text": "x" * length}).encode() + b"\n" for length in lengths)
    assert len(lines) > 3 << 20
    (path := tmp_path / f"a.jsonl{suffix}").write_bytes(PACKERS[suffix](lines))
    for chunk_bytes in (30_000, 200_000):
        assert goes_on_anywhere(path, max_record_bytes=60_000, chunk_bytes=chunk_bytes) > 5


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_members_and_frames_one_after_the_other_are_one_file(tmp_path: Path, suffix: str) -> None:
    half = LINES.index(b"\n", len(LINES) // 2) - 5  # in the middle of a line
    (tmp_path / f"a.jsonl{suffix}").write_bytes(PACKERS[suffix](LINES[:half]) + PACKERS[suffix](LINES[half:]))
    assert texts_of(tmp_path / f"a.jsonl{suffix}") == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_of_a_file_that_is_cut_off_the_records_before_count(tmp_path: Path, suffix: str, chunk_bytes: int) -> None:
    packed = PACKERS[suffix](LINES) + PACKERS[suffix](LINES)
    (path := tmp_path / f"a.jsonl{suffix}").write_bytes(packed[:-10])
    texts, (bad,) = texts_of(path, chunk_bytes=chunk_bytes), bad_of(path, chunk_bytes=chunk_bytes)
    assert texts[: len(TEXTS)] == TEXTS
    assert texts[len(TEXTS) :] == TEXTS[: len(texts) - len(TEXTS)]
    assert (bad.file, bad.line) == (path.name, len(texts) + 1)
    assert "stream is cut off" in bad.reason
    assert f"the file ends at byte {len(packed) - 10}" in bad.reason


def test_a_damaged_stream_is_named_with_the_byte(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(LINES) + gzip.compress(LINES))
    packed[-6] ^= 1  # the checksum of the second member
    (path := tmp_path / "a.jsonl.gz").write_bytes(packed)
    texts, (bad,) = texts_of(path), bad_of(path)
    assert texts[: len(TEXTS)] == TEXTS
    assert "the gzip stream is damaged before byte" in bad.reason
    (path := tmp_path / "b.jsonl.gz").write_bytes(b"no gzip at all")
    assert (texts_of(path), bad_of(path)[0].line) == ([], 1)


def test_a_text_that_is_cut_off_is_no_document(tmp_path: Path) -> None:
    (path := tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    assert texts_of(path) == []
    assert "cut off" in bad_of(path)[0].reason


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 22])
def test_an_over_long_line_is_named_and_passed_by(tmp_path: Path, suffix: str, chunk_bytes: int) -> None:
    line = json.dumps({"text": "x" * 2_500_000}).encode()
    fits = json.dumps({"text": "y" * (5000 - 12)}).encode()
    assert len(fits) == 5000
    (path := tmp_path / f"a.jsonl{suffix}").write_bytes(PACKERS[suffix](b'{"text": "a"}\n' + line + b"\n" + fits + b"\n" + line))
    settings = {"max_record_bytes": 5000, "chunk_bytes": chunk_bytes}
    assert texts_of(path, **settings) == ["a", "y" * 4988]
    bad = bad_of(path, **settings)
    assert [record.line for record in bad] == [2, 4]
    assert bad[0].reason == "longer than 4.9 KiB; `surefoot data prepare --max-record-bytes N` raises the limit"
    after = all_records(path, **settings)[2]
    assert not isinstance(after, BadRecord)
    assert after.byte_offset == 14 + len(line) + 1


def test_texts_and_values_have_the_same_limit(tmp_path: Path) -> None:
    for size, num_bad in ((100, 0), (101, 1)):
        (tmp_path / "a.txt").write_text("x" * size)
        (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * size))
        write_parquet(tmp_path / "c.parquet", ["x" * size])
        for name in ("a.txt", "b.txt.gz", "c.parquet"):
            assert len(bad_of(tmp_path / name, max_record_bytes=100)) == num_bad


@pytest.mark.parametrize(
    ("name", "data", "line", "reason"),
    [
        ("a.txt", b"one\ntw\0o", 2, "a NUL character at offset 6"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\\u0000"}\n', 2, "field 'text' holds a NUL character at character 1"),
        ("a.jsonl", b'{"text": "a\xff"}\n', 1, "not UTF-8: byte 0xff"),
        ("a.txt.gz", gzip.compress(b"one\n\xb1", mtime=0), 2, "not UTF-8: byte 0xb1 at offset 4"),
        ("a.parquet", b"PAR1 is not all of it", 1, "the Parquet file is damaged from this row on"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, name: str, data: bytes, line: int, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    (bad,) = bad_of(tmp_path / name)
    assert (bad.file, bad.line) == (name, line)
    assert reason in bad.reason


def test_rows_of_parquet_are_named_by_their_number(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["one", None, "", "größe"])
    found = all_records(path)
    assert [(bad.line, bad.reason) for bad in bad_of(path)] == [(2, "null in column 'text'")]
    last = found[-1]
    assert not isinstance(last, BadRecord)
    assert (last.text, last.record, last.byte_offset, last.byte_length) == ("größe", 4, 0, 7)


def test_text_in_parquet_may_be_bytes_or_a_dictionary_and_may_be_no_utf8(tmp_path: Path) -> None:
    columns = {
        "bytes": pa.array([b"a", b"\xff"], pa.binary()),
        "large": pa.array(["a", "b"], pa.large_string()),
        "coded": pa.array(["a", "b"]).dictionary_encode(),
    }
    for name, column in columns.items():
        pq.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
    assert texts_of(tmp_path / "large.parquet") == texts_of(tmp_path / "coded.parquet") == ["a", "b"]
    assert texts_of(tmp_path / "bytes.parquet") == ["a"]
    assert bad_of(tmp_path / "bytes.parquet")[0].reason == "not UTF-8: byte 0xff at offset 0"


def test_of_a_damaged_parquet_file_the_rows_before_count(tmp_path: Path) -> None:
    values: list[str | None] = [f"{number:04d}" * 300 for number in range(2000)]
    path = write_parquet(tmp_path / "a.parquet", values, row_group_size=500)
    data = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(2).column(1)
    begin = group.dictionary_page_offset or group.data_page_offset
    data[begin : begin + 400] = bytes(400)
    path.write_bytes(data)
    texts, (bad,) = texts_of(path), bad_of(path)
    assert texts == values[: len(texts)]
    assert len(texts) == bad.line - 1
    assert 700 < len(texts) <= 1000


def test_a_column_that_is_not_there_is_fatal_and_the_others_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"], "number": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column 'text'; the file has body, number") as caught:
        all_records(tmp_path / "a.parquet")
    assert caught.value.where == "a.parquet"
    pq.write_table(pa.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="is int64, wanted text"):
        all_records(tmp_path / "a.parquet")
