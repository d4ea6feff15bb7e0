"""A shard made anew: as many tokens, nothing else moves, and what changed is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest

from surefoot.cli.main import run
from surefoot.core.errors import DataError
from surefoot.core.sections import SourceSection
from surefoot.data.manifest import Manifest, earlier_name, load_manifest
from surefoot.data.prepare import prepare
from surefoot.data.prepared import check_side_files
from surefoot.data.reprocess import reprocess
from surefoot.data.shards import TokenStore
from tests.unit.data.test_frozen_formats import FORMAT_1
from tests.unit.data.test_prepare import bytes_of, texts_in, write_texts

TEXTS = [f"document {number} " + "with a ft_y mistake " * (number % 5) for number in range(60)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three shards of 20 documents and more, of two sources."""
    write_texts(tmp_path / "a.jsonl", TEXTS)
    sources = [
        SourceSection(name="text", files=(str(tmp_path / "a.jsonl"),)),
        SourceSection(name="other", files=(str(tmp_path / "a.jsonl"),)),
    ]
    prepare(sources, out=tmp_path / "out", tokenizer="bytes", heldout_fraction=0.05, shard_bytes=2500)
    return tmp_path / "out"


def stream(path: Path, manifest: Manifest, *, source: str = "text") -> npt.NDArray[Any]:
    store = TokenStore(path, source=source, split="train", manifest=manifest)
    tokens = store.read(0, store.num_tokens)
    store.close()
    return tokens


def texts_of_shard(path: Path, *, number: int) -> list[str]:
    """What the shard holds, by the provenance of its documents."""
    shards = load_manifest(path).sources["text"].splits["train"].shards
    docs = [shard.docs for shard in shards]
    return texts_in(path, split="train")[sum(docs[:number]) : sum(docs[: number + 1])]


def mended(path: Path, texts: list[str]) -> Path:
    return write_texts(path, [text.replace("ft_y", "fifty") for text in texts])


@pytest.mark.parametrize("how", ["longer", "shorter", "same"])
def test_every_other_token_stays_where_it_is(data: Path, tmp_path: Path, how: str) -> None:
    before, kept_bytes = load_manifest(data), bytes_of(data)
    texts = texts_of_shard(data, number=1)
    given = {
        "longer": [text.replace("ft_y", "fifty") for text in texts],
        "shorter": [text.replace("ft_y", "f") for text in texts],
        "same": texts,
    }[how]
    after = reprocess(data, shard="text/00001", inputs=[str(write_texts(tmp_path / "b.jsonl", given))])

    old, new = stream(data, before), stream(data, after)
    shards = before.sources["text"].splits["train"].shards
    begin, end = shards[0].tokens, shards[0].tokens + shards[1].tokens
    assert len(old) == len(new)
    assert np.array_equal(old[:begin], new[:begin])
    assert np.array_equal(old[end:], new[end:])
    assert np.array_equal(old, new) == (how == "same")
    assert new[end - 1] == after.tokenizer.eos_id
    assert {name: kept_bytes[name] for name in kept_bytes if name != "manifest.json"}.items() <= bytes_of(data).items()
    change = after.replaced[0]
    assert (change.shard, change.by) == ("00001", "00001-r1")
    assert (change.padded_tokens > 0, change.cut_documents > 0) == (how == "shorter", how == "longer")
    assert change.documents_kept + change.documents_gone == len(texts)
    check_side_files(data, after)


def test_the_manifest_before_is_its_parent_and_stays_readable(data: Path, tmp_path: Path) -> None:
    before = load_manifest(data)
    texts = texts_of_shard(data, number=1)
    after = reprocess(data, shard="text/00001", inputs=[str(mended(tmp_path / "b.jsonl", texts))])
    assert load_manifest(data) == after
    assert after.parent == before.sha256 != after.sha256
    assert load_manifest(data, name=earlier_name(before.sha256)) == before
    assert after.sources["other"] == before.sources["other"]
    again = reprocess(data, shard="text/00001-r1", inputs=[str(tmp_path / "b.jsonl")])
    assert again.parent == after.sha256
    assert [change.by for change in again.replaced] == ["00001-r1", "00001-r2"]
    assert np.array_equal(stream(data, again), stream(data, after))


def test_the_difference_is_listed(data: Path, tmp_path: Path) -> None:
    texts = texts_of_shard(data, number=1)
    after = reprocess(data, shard="text/00001", inputs=[str(mended(tmp_path / "b.jsonl", texts))])
    entry = after.sources["text"].splits["train"].shards[1]
    diff = json.loads((data / "text" / "train" / f"{entry.name}.diff.json").read_text())
    change = after.replaced[0]
    assert (len(diff["gone"]), len(diff["new"])) == (change.documents_gone, change.documents_new)
    assert change.documents_kept == sum("ft_y" not in text for text in texts)
    assert entry.files["diff.json"].bytes == (data / "text" / "train" / f"{entry.name}.diff.json").stat().st_size


def test_documents_of_other_shards_and_held_out_ones_do_not_come_in(data: Path, tmp_path: Path) -> None:
    """The whole corrected file may be given, though the shard holds a third of it. The indexes of the others are enough to tell."""
    texts = texts_of_shard(data, number=1)
    for origins in (data / "text").rglob("*.src.parquet"):
        if origins.parent.name == "heldout" or origins.name != "00001.src.parquet":
            origins.unlink()
    given = [text.replace("ft_y", "f") if text in texts else text for text in TEXTS]
    after = reprocess(data, shard="text/00001", inputs=[str(write_texts(tmp_path / "b.jsonl", given))])
    assert after.replaced[0].padded_tokens > 0
    held_out = set(texts_in(data, split="heldout"))
    assert held_out
    assert not held_out & set(texts_of_shard(data, number=1))
    assert set(texts_of_shard(data, number=1)) - {""} <= {text.replace("ft_y", "f") for text in texts}


def test_a_shard_of_a_format_without_indexes_is_made_anew(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_1, tmp_path / "format1")
    before = load_manifest(tmp_path / "format1" / "data").split("text", "train").shards[0]
    inputs = [str(tmp_path / "format1" / "docs.jsonl")]
    after = reprocess(tmp_path / "format1" / "data", shard="text/00000", inputs=inputs, on_bad_record="skip")
    change = after.replaced[0]
    assert (change.documents_kept, change.documents_gone, change.documents_new) == (before.docs, 0, 0)
    assert (change.padded_tokens, change.cut_documents) == (0, 0)


def test_padding_is_one_document_without_text_of_no_file(data: Path, tmp_path: Path) -> None:
    after = reprocess(data, shard="text/00001", inputs=[str(write_texts(tmp_path / "b.jsonl", ["short"]))])
    entry, change = after.sources["text"].splits["train"].shards[1], after.replaced[0]
    rows = pq.read_table(data / "text" / "train" / f"{entry.name}.src.parquet").to_pylist()
    assert [(row["file"], row["record"]) for row in rows] == [("b.jsonl", 1), ("(padding)", 0)]
    lengths = np.frombuffer((data / "text" / "train" / f"{entry.name}.len").read_bytes(), dtype="<u4", count=entry.docs)
    assert lengths.tolist() == [6, change.padded_tokens]
    assert sum(lengths) == entry.tokens


def test_a_shard_that_is_not_there_and_another_tokenizer_are_refused(data: Path, tmp_path: Path) -> None:
    inputs = [str(write_texts(tmp_path / "b.jsonl", ["x"]))]
    before = bytes_of(data)
    for shard, message in (("text/00009", r"no shard '00009'.*there are text/00000, text/00001"), ("code/00000", "no source 'code'")):
        with pytest.raises(DataError, match=message):
            reprocess(data, shard=shard, inputs=inputs)
    assert bytes_of(data) == before
    (data / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(DataError, match="not the tokenizer that made the data"):
        reprocess(data, shard="text/00001", inputs=inputs)


def test_the_command_says_what_changed(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_manifest(data).sha256
    write_texts(tmp_path / "b.jsonl", ["short"])
    assert run(["data", "prepare", str(tmp_path / "b.jsonl"), "--out", str(data), "--reprocess", "text/00001"]) == 0
    said = capsys.readouterr().out
    assert "text/00001 as 00001-r1: 0 documents kept" in said
    assert f"parent        {before}" in said
    assert "--on-data-change map" in said
