"""Several sources in one folder, quality rules, side files, and any number of workers."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from surefoot.cli.main import run
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.sections import SourceSection
from surefoot.data.inputs import changed_inputs
from surefoot.data.manifest import Manifest, load_manifest
from surefoot.data.prepare import prepare
from surefoot.data.prepared import check_prepared, prepare_command
from surefoot.data.quality.minhash import signatures
from surefoot.data.quality.rules import RuleSet
from tests.unit.data.test_cutting import LINES, TEXTS, pack_zstd, write_parquet
from tests.unit.data.test_prepare import bytes_of, prepare_file, texts_in, write_texts

RUN_OF_BLANKS = "start" + " " * 3000 + "end"


@pytest.fixture
def sources(tmp_path: Path) -> list[SourceSection]:
    """Every kind of file, in two sources that share documents."""
    web, code = tmp_path / "web", tmp_path / "code"
    web.mkdir()
    code.mkdir()
    (web / "a.jsonl.gz").write_bytes(gzip.compress(LINES + b"{broken\n"))
    (web / "b.jsonl.zst").write_bytes(pack_zstd(b"".join(json.dumps({"text": f"b{text}"}).encode() + b"\n" for text in TEXTS)))
    write_parquet(web / "c.parquet", [f"c{text}" for text in TEXTS])
    for number in range(10):
        (code / f"{number}.py").write_text(f"print({number})")
    (code / "shared.txt").write_text(TEXTS[5])
    (code / "copy.txt.gz").write_bytes(gzip.compress(b"print(3)"))
    return [SourceSection(name="web", files=(str(web),)), SourceSection(name="code", files=(str(code),))]


def prepare_both(sources: list[SourceSection], out: Path, **settings: Any) -> Manifest:
    return prepare(sources, out=out, **{"tokenizer": "bpe:300", "heldout_fraction": 0.1, "on_bad_record": "skip", **settings})


def test_any_number_of_workers_gives_the_same_bytes(sources: list[SourceSection], tmp_path: Path) -> None:
    prepare_both(sources, tmp_path / "one", workers=1)
    wanted = bytes_of(tmp_path / "one")
    for workers, chunk_bytes in ((1, 700), (3, 3000)):
        out = tmp_path / f"{workers}-{chunk_bytes}"
        prepare_both(sources, out, workers=workers, chunk_bytes=chunk_bytes)
        assert bytes_of(out) == wanted
    prepare_both(sources, tmp_path / "other", heldout_fraction=0.2)
    assert bytes_of(tmp_path / "other") != wanted


def test_each_source_has_its_own_splits_copies_and_rejects(sources: list[SourceSection], tmp_path: Path) -> None:
    manifest = prepare_both(sources, tmp_path / "out")
    web, code = manifest.sources["web"], manifest.sources["code"]
    assert (web.duplicates, web.bad_records, web.shared) == (0, 1, 1)
    assert (code.duplicates, code.bad_records, code.shared) == (1, 0, 1)
    assert sum(split.docs for split in web.splits.values()) == 3 * len(TEXTS)
    assert sum(split.docs for split in code.splits.values()) == 11
    assert all(split.docs > 0 for entry in (web, code) for split in entry.splits.values())
    assert b"print" in (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert load_manifest(tmp_path / "out") == manifest


def test_the_split_of_a_source_does_not_hang_on_the_others(sources: list[SourceSection], tmp_path: Path) -> None:
    for name, some in (("both", sources), ("one", sources[:1])):
        prepare_both(some, tmp_path / name, tokenizer="bytes")
    both, one = bytes_of(tmp_path / "both"), bytes_of(tmp_path / "one")
    assert {name for name in one if name.startswith("web/")} == {name for name in both if name.startswith("web/")}
    assert all(both[name] == data for name, data in one.items() if name.startswith("web/"))


def test_preparing_again_and_the_config_know_all_sources(sources: list[SourceSection], tmp_path: Path) -> None:
    first = prepare_both(sources, tmp_path / "out")
    assert prepare_both(sources, tmp_path / "out") == first
    with pytest.raises(DataError, match="other data is already prepared here: source web, code, asked for web"):
        prepare_both(sources[:1], tmp_path / "out")
    asked: dict[str, Any] = {"tokenizer": "bpe:300", "heldout_fraction": 0.1}
    check_prepared(tmp_path / "out", sources=sources, **asked)
    with pytest.raises(DataError, match=r"name code, web, the config asks for web") as caught:
        check_prepared(tmp_path / "out", sources=sources[:1], **asked)
    assert "--force" in caught.value.hint
    assert changed_inputs(tmp_path / "out", sources) is None
    (tmp_path / "code" / "11.py").write_text("x")
    assert "names 16" in (changed_inputs(tmp_path / "out", sources) or "")


def test_the_command_names_every_source(sources: list[SourceSection], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = prepare_command(sources, out=tmp_path / "out", tokenizer="bytes", heldout_fraction=0.1)
    assert f"--source web={tmp_path}/web --source code={tmp_path}/code" in command
    assert run([*command.split()[1:], "--on-bad-record", "skip"]) == 0
    said = capsys.readouterr().out
    assert "1 documents are in another source too" in said
    assert 'those with name = "web" and name = "code"' in said
    assert set(load_manifest(tmp_path / "out").sources) == {"web", "code"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.txt", "--source", "a=x.txt"], "both INPUT and --source"),
        ([], "no input"),
        (["--source", "a"], "'a' names no source"),
        (["--source", "a=x.txt", "--rules-off", "b=byte-run"], "no source 'b'"),
        (["--source", "a=x.txt", "--rules-off", "a=byte-run"], "no rules to switch off"),
        (["--source", "a=x.txt", "--rules", "default", "--rules-off", "a=nope"], "no rule 'nope'"),
        (["x.txt", "--max-record-bytes", "0"], "records of up to 0 bytes"),
        (["x.txt", "--workers", "-1"], "-1 workers"),
    ],
)
def test_bad_options_are_usage_errors(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "prepare", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_rules_nothing_is_dropped_and_with_them_each_reject_is_told(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", ["good text", RUN_OF_BLANKS, "more text", RUN_OF_BLANKS])
    assert prepare_file(path, tmp_path / "off").sources["text"].rejected == {}
    manifest = prepare_file(path, tmp_path / "on", rules=RuleSet())
    source = manifest.sources["text"]
    assert (manifest.rules, source.rejected, source.duplicates) == (RuleSet().sha256, {"byte-run": 1}, 1)
    assert texts_in(tmp_path / "on", split="train") == ["good text", "more text"]
    (reject,) = [json.loads(line) for line in (tmp_path / "on" / "text" / "rejects.jsonl").read_text().splitlines()]
    assert (reject["rule"], reject["line"], reject["score"]) == ("byte-run", 2, 3000.0)
    assert reject["excerpt"].startswith("start   ")
    section = SourceSection(name="text", files=(str(path),), rules_off=("byte-run",))
    kept = prepare([section], out=tmp_path / "but", tokenizer="bytes", heldout_fraction=0.0, rules=RuleSet())
    assert "byte-run" not in kept.sources["text"].rejected


def test_of_what_rules_drop_only_the_first_of_a_text_is_told(tmp_path: Path) -> None:
    """In any order with bad records, and over chunks."""
    texts = [f"{number % 4} {RUN_OF_BLANKS}" if number % 3 else f"good {number}" for number in range(24)]
    path = write_texts(tmp_path / "a.jsonl", texts)
    path.write_text(path.read_text() + "{broken\n" + path.read_text())
    settings: dict[str, Any] = {"rules": RuleSet(), "on_bad_record": "skip", "chunk_bytes": 7000}
    source = prepare_file(path, tmp_path / "out", **settings).sources["text"]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "text" / "rejects.jsonl").read_text().splitlines()]
    assert [reject["line"] for reject in rejects] == [2, 3, 5, 8, 25]
    assert (source.rejected, source.bad_records) == ({"byte-run": 4}, 1)


def test_memory_does_not_grow_with_what_is_rejected(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", ["good"])
    prepare_file(path, tmp_path / "few")
    path.write_text(path.read_text() + "{broken\n" * 15_000)
    tracemalloc.start()
    try:
        prepare_file(path, tmp_path / "out", on_bad_record="skip", chunk_bytes=8000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out" / "text" / "rejects.jsonl").stat().st_size > 2 << 20
    assert peak_bytes < 3 << 20


def test_a_rule_that_only_flags_drops_nothing(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", ["few words", "some more"])
    assert RuleSet().judge("few words")[0].action == "flag"
    assert prepare_file(path, tmp_path / "out", rules=RuleSet()).sources["text"].splits["train"].docs == 2


def test_indexes_and_signatures_are_of_the_documents(tmp_path: Path) -> None:
    manifest = prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "out")
    (entry,) = manifest.sources["text"].splits["train"].shards
    folder = tmp_path / "out" / "text" / "train"
    data = (folder / "00000.idx").read_bytes()
    keys = np.frombuffer(data, dtype="<u8", count=entry.docs)
    numbers = np.frombuffer(data, dtype="<u4", offset=8 * entry.docs)
    assert np.all(keys[1:] > keys[:-1])
    hashes = [hash_of(text) for text in TEXTS]
    assert [hashes[number] for number in numbers] == keys.tolist()
    tokens = np.frombuffer((folder / "00000.tok").read_bytes(), dtype="<u2", offset=4096)
    ends = np.flatnonzero(tokens == manifest.tokenizer.eos_id) + 1
    wanted = signatures(np.split(tokens, ends)[:-1])
    assert np.array_equal(np.frombuffer((folder / "00000.sig").read_bytes(), dtype="<u2").reshape(-1, 32), wanted)


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@pytest.mark.parametrize("suffix", ["sum", "len", "idx", "sig", "src.parquet"])
def test_a_file_beside_a_shard_that_changed_is_found_when_preparing_again(tmp_path: Path, suffix: str) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    prepare_file(path, tmp_path / "out")
    file = tmp_path / "out" / "text" / "train" / f"00000.{suffix}"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="not the file that was written") as caught:
        prepare_file(path, tmp_path / "out")
    assert caught.value.where == str(file)


def test_the_same_file_twice_is_said_and_its_documents_are_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    section = SourceSection(name="text", files=(str(path), str(tmp_path / "*.jsonl")))
    source = prepare([section], out=tmp_path / "out", tokenizer="bytes").sources["text"]
    assert source.duplicates == len(TEXTS)
    assert f"{path} is named more than once" in caplog.text


def test_a_zero_byte_file_of_any_kind_counts_as_one_empty_document(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("a.txt", "b.jsonl", "c.parquet", "d.jsonl.gz", "e.txt.zst"):
        (corpus / name).touch()
    (corpus / "f.txt").write_text("text")
    assert prepare_file(corpus, tmp_path / "out").sources["text"].empty == 5


def test_a_limit_on_records_reaches_every_worker(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    settings: dict[str, Any] = {"max_record_bytes": 100, "on_bad_record": "skip", "chunk_bytes": 3000, "workers": 2}
    source = prepare_file(path, tmp_path / "out", **settings).sources["text"]
    assert source.bad_records == sum(len(line) > 100 for line in LINES.splitlines()) > 0
    for wrong in (0, 1 << 40):
        with pytest.raises(ConfigError, match="records of up to"):
            prepare_file(path, tmp_path / "other", max_record_bytes=wrong)


def test_a_lost_worker_leaves_what_is_finished(tmp_path: Path) -> None:
    """The workers are killed from outside, as by a machine without memory."""
    path = write_texts(tmp_path / "a.jsonl", TEXTS * 3 + [f"{number} and more" for number in range(3000)])

    def kill_workers(progress: object) -> None:
        if "tokenizing" in str(progress):
            for child in psutil.Process().children():
                child.kill()

    settings: dict[str, Any] = {"chunk_bytes": 2000, "workers": 2}
    with pytest.raises(DataError, match="a worker process ended by SIGKILL"):
        prepare_file(path, tmp_path / "out", progress=kill_workers, **settings)
    told: list[str] = []
    prepare_file(path, tmp_path / "out", progress=lambda progress: told.append(progress.stage), **settings)
    assert told[0] == "tokenizing"
    prepare_file(path, tmp_path / "whole")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_pyarrow_waits_until_shards_are_written() -> None:
    """A process that forks ranks may have looked at data, but must not hold pyarrow."""
    script = "import surefoot.data.prepare, surefoot.data.reprocess, sys; print('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
