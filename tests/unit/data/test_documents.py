from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.errors import DataError
from surefoot.data.corpus import PYTHON_STDLIB, list_files
from surefoot.data.documents import BadRecord, Document, read_documents


def read(path: Path, **settings: Any) -> tuple[list[Document], list[BadRecord]]:
    bad: list[BadRecord] = []
    documents = list(read_documents(list_files([path], source="text"), source="text", on_bad=bad.append, **settings))
    return documents, bad


def write_lines(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def test_a_folder_is_read_sorted_with_relative_names(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "b").mkdir(parents=True)
    (corpus / "b" / "z.md").write_text("zed")
    (corpus / "a.txt").write_text("first")
    (corpus / "c.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    documents, bad = read(corpus)
    assert [(document.file, document.record, document.text) for document in documents] == [
        ("corpus/a.txt", 1, "first"),
        ("corpus/b/z.md", 1, "zed"),
        ("corpus/c.jsonl", 1, "one"),
        ("corpus/c.jsonl", 2, "two"),
    ]
    assert not bad


def test_hidden_and_unknown_files_stay_out_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", ".hidden.txt", "weights.bin"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "b.txt").write_text("x")
    with caplog.at_level(logging.WARNING):
        assert [file.path.name for file in list_files([tmp_path], source="text")] == ["a.txt"]
    assert ".bin (1)" in caplog.text


def test_a_file_named_outright_is_read_whatever_its_ending(tmp_path: Path) -> None:
    (tmp_path / "notes.weird").write_text("x")
    assert [document.text for document in read(tmp_path / "notes.weird")[0]] == ["x"]


def test_two_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("one", "two"):
        (tmp_path / parent / "corpus").mkdir(parents=True)
        (tmp_path / parent / "corpus" / "a.txt").write_text(parent)
    files = list_files([tmp_path / "one" / "corpus", tmp_path / "two" / "corpus"], source="text")
    assert [file.name for file in files] == ["corpus/a.txt", "corpus#2/a.txt"]


def make_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("corpus/*.md", ["corpus/a.md", "corpus/b.md"]),
        ("corpus/**/*.md", ["corpus/a.md", "corpus/b.md", "corpus/deep/er/d.md"]),
        ("corpus/**", ["corpus/a.md", "corpus/b.md", "corpus/c.weird", "corpus/deep/er/d.md"]),
        ("corp*/[ab].md", ["here/corpus/a.md", "here/corpus/b.md"]),
        ("x[1]/?.md", ["x[1]/e.md"]),
        ("x[1]/e.md", ["e.md"]),
    ],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_pattern_is_its_files_sorted_with_relative_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, names: list[str], is_absolute: bool
) -> None:
    here = tmp_path / "here"
    make_files(here, *(f"corpus/{name}" for name in ("b.md", "a.md", "c.weird", ".hidden.md", ".git/x.md", "deep/er/d.md")), "x[1]/e.md")
    monkeypatch.chdir(here)
    files = list_files([here / pattern if is_absolute else pattern], source="text")
    assert [file.name for file in files] == names
    assert [file.path.read_text() for file in files] == [file.path.resolve().relative_to(here).as_posix() for file in files]


def test_files_of_several_inputs_keep_names_of_their_own(tmp_path: Path) -> None:
    make_files(tmp_path, "corpus/a.md", "corpus/b.txt", "more/corpus/a.md", "odd/corpus#2/a.md")
    inputs = [tmp_path / "odd/corpus#2", tmp_path / "corpus/*.md", tmp_path / "corpus/*.txt", tmp_path / "more/corpus"]
    names = [file.name for file in list_files(inputs, source="text")]
    assert names == ["corpus#2/a.md", "corpus/a.md", "corpus#3/b.txt", "corpus#4/a.md"]


@pytest.mark.parametrize(
    ("pattern", "hint"), [("*.jsonl", "check the pattern"), ("none/**", "check the pattern"), ("fold*", "folders only")]
)
def test_a_pattern_that_matches_no_file_is_named(tmp_path: Path, pattern: str, hint: str) -> None:
    make_files(tmp_path, "folder/a.txt")
    with pytest.raises(DataError, match="matches no file") as caught:
        list_files([tmp_path / pattern], source="text")
    assert str(tmp_path / pattern) in caught.value.what
    assert hint in caught.value.hint


def test_missing_empty_and_packed_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a.jsonl.xz", "a.tar.gz", "a.parquet.zst"):
        (tmp_path / name).write_bytes(b"x")
    for given, message in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "empty", "no text file"),
        (tmp_path / "a.jsonl.xz", "packed"),
        (tmp_path / "a.tar.gz", "packed"),
        (tmp_path / "a.parquet.zst", "packed"),
    ):
        with pytest.raises(DataError, match=message):
            list_files([given], source="text")
    with pytest.raises(DataError, match="no input files"):
        list_files([], source="text")


def test_the_standard_library_is_there_without_tests_and_site_packages() -> None:
    names = [file.name for file in list_files([PYTHON_STDLIB], source="text")]
    assert "python-stdlib/os.py" in names
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"test", "tests", "site-packages", "dist-packages"} & set(name.split("/"))]


def test_a_text_keeps_its_bytes_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("größe\r\nx\r".encode())
    assert read(tmp_path / "a.txt")[0] == [Document("größe\r\nx\r", "text", "a.txt", 1, 0, 11)]


def test_records_know_their_bytes(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "one"}', b"", b'{"id": 3, "text": "zwei \xc3\xa4"}\r')
    documents, bad = read(path)
    assert not bad
    data = path.read_bytes()
    spans = [data[document.byte_offset : document.byte_offset + document.byte_length].decode("utf-8-sig") for document in documents]
    assert [json.loads(span)["text"] for span in spans] == [document.text for document in documents] == ["one", "zwei ä"]
    assert [document.record for document in documents] == [1, 3]


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", b'{"content": "one"}')
    assert [document.text for document in read(path, text_field="content")[0]] == ["one"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "broken JSON"),
        (b'["text"]', "wanted a JSON object, got list"),
        (b'{"body": "x"}', "no field 'text'; the record has body"),
        (b'{"text": 5}', "is int, wanted a string"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff"),
        (rb'{"text": "\ud800"}', "half a surrogate pair"),
        (b"[" * 100_000, "broken JSON"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", b'{"text": "good"}', line, b'{"text": "good too"}')
    documents, bad = read(path)
    assert [document.text for document in documents] == ["good", "good too"]
    assert [(record.file, record.line) for record in bad] == [("a.jsonl", 2)]
    assert reason in bad[0].reason


def test_a_text_file_that_is_not_utf8_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xb1\n")
    documents, bad = read(tmp_path / "a.txt")
    assert not documents
    assert (bad[0].line, bad[0].reason) == (3, "not UTF-8: byte 0xb1 at offset 8")
