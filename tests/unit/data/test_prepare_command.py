from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.cli.main import run
from surefoot.data.manifest import load_manifest


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"body": f"document {number}"}) + "\n" for number in range(50)) + '{"body": "document 1"}\n')
    return path


def test_it_prepares_and_says_what_came_out(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "prepare", str(corpus), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--text-field", "body"]) == 0
    said = capsys.readouterr()
    assert "text/train" in said.out
    assert "1 copies, 0 empty, 0 bad records" in said.out
    assert "tokenizing" in said.err
    assert load_manifest(tmp_path / "out").sha256 in said.out


def test_json_is_one_object_with_stable_keys(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokenizer", "bpe:300", "--text-field", "body", "--name", "mine", "--heldout-fraction", "0.1", "--json"]
    assert run(["data", "prepare", str(corpus), "--out", str(tmp_path / "out"), *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    stable = {"schema_version", "path", "manifest_sha256", "tokenizer", "dtype", "heldout_fraction", "sources"}
    assert set(answer) == stable | {"parent", "rules", "replaced"}
    assert answer["schema_version"] == 1
    mine = answer["sources"]["mine"]
    assert (mine["documents"], mine["duplicates"], mine["bad_records"]) == (50, 1, 0)
    assert mine["splits"]["train"]["docs"] + mine["splits"]["heldout"]["docs"] == 50
    assert answer["manifest_sha256"] == load_manifest(tmp_path / "out").sha256


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        ([], 4, "no field 'text'"),
        (["--text-field", "body", "--tokenizer", "bpe:few"], 2, "not a vocabulary size"),
        (["--text-field", "body", "--tokenizer", "none.json"], 4, "cannot read the tokenizer file"),
        (["--text-field", "body", "--heldout-fraction", "0.9"], 2, "held-out fraction"),
        (["--text-field", "body", "--on-bad-record", "maybe"], 2, "maybe"),
    ],
)
def test_bad_use_ends_with_its_exit_code_and_leaves_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], exit_code: int, message: str
) -> None:
    assert run(["data", "prepare", str(corpus), "--out", str(tmp_path / "out"), *options]) == exit_code
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_an_error_is_one_json_object_when_asked(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.write_text("{broken\n")
    assert run(["data", "prepare", str(corpus), "--out", str(tmp_path / "out"), "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["where"]) == ("data", "corpus.jsonl:1")
    assert "broken JSON" in error["what"]
