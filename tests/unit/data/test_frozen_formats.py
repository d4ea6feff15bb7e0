"""Every released format stays readable, and a run that began under it goes on with the same samples. Never write these files anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from surefoot.core.sections import SourceSection
from surefoot.data.loader import ShardedLoader
from surefoot.data.manifest import SPLITS, earlier_name, load_manifest
from surefoot.data.prepare import prepare
from surefoot.data.prepared import check_side_files
from surefoot.data.quality.rules import RuleSet
from surefoot.data.reprocess import reprocess
from surefoot.data.shards import TokenStore
from surefoot.data.tokenizer import load_tokenizer

FORMAT_1 = Path(__file__).parent / "frozen" / "format1"
FORMAT_2 = FORMAT_1.with_name("format2")


def test_format_1_is_read_and_its_cursor_goes_on(open_loader: Callable[..., ShardedLoader]) -> None:
    loader = open_loader(FORMAT_1 / "data")
    cursor = json.loads((FORMAT_1 / "cursor.json").read_text())
    loader.seek(cursor)
    now = loader.cursor()
    assert {name: now[name] for name in cursor if name not in ("version", "per_source")} == {
        name: value for name, value in cursor.items() if name not in ("version", "per_source")
    }
    assert cursor["version"] == 1
    assert now["per_source"]["text"].items() >= cursor["per_source"]["text"].items()
    step = next(loader)
    assert [batch.sample_ids_B.tolist() for batch in step.micro_batches] == [[18, 38], [5, 33], [43, 25]]
    tokens = step.micro_batches[0].tokens_BS[0].tolist()
    assert load_tokenizer(FORMAT_1 / "data" / "tokenizer.json").decode(tokens) == "ment 8: größe "
    assert pq.read_table(FORMAT_1 / "data" / "text" / "train" / "00000.src.parquet").num_rows == 25


def test_the_tokens_of_format_1_are_still_written_to_the_byte(tmp_path: Path) -> None:
    source = SourceSection(name="text", files=(str(FORMAT_1 / "docs.jsonl"),))
    prepare([source], out=tmp_path / "data", tokenizer="bytes", heldout_fraction=0.2, on_bad_record="skip")
    for name in ("train/00000.tok", "train/00000.sum", "train/00000.len", "heldout/00000.tok", "rejects.jsonl"):
        assert (tmp_path / "data" / "text" / name).read_bytes() == (FORMAT_1 / "data" / "text" / name).read_bytes()
    now, before = (load_manifest(folder / "data").sources["text"] for folder in (tmp_path, FORMAT_1))
    assert replace(now, splits={}, heldout_below="") == replace(before, splits={})
    for split in SPLITS:
        assert [replace(shard, files={}) for shard in now.splits[split].shards] == list(before.splits[split].shards)


def test_format_2_is_read_with_a_shard_that_was_made_anew() -> None:
    manifest = load_manifest(FORMAT_2 / "data")
    assert manifest.sha256 == "82556d33a7d8e86b32333b0fd0a8497684b50cda833b1dd02458d5aa60e73d55"
    assert load_manifest(FORMAT_2 / "data", name=earlier_name(manifest.parent)).sha256 == manifest.parent
    (change,) = manifest.replaced
    assert (change.shard, change.by, change.padded_tokens) == ("00001", "00001-r1", 283)
    assert manifest.sources["text"].rejected == {"byte-run": 1}
    check_side_files(FORMAT_2 / "data", manifest)
    store = TokenStore(FORMAT_2 / "data", source="text", split="train", manifest=manifest)
    tokens = store.read(0, store.num_tokens)
    store.close()
    text = load_tokenizer(FORMAT_2 / "data" / "tokenizer.json").decode(tokens.tolist())
    assert "mended 0" in text
    assert "document 0: größe 0" in text


def test_format_2_is_still_written_to_the_byte(tmp_path: Path) -> None:
    """Parquet alone may differ: its bytes are the library's."""
    sources = [SourceSection(name=name, files=(str(FORMAT_2 / file),)) for name, file in (("text", "docs.jsonl"), ("other", "more.jsonl"))]
    settings: dict[str, Any] = {"tokenizer": "bytes", "heldout_fraction": 0.2, "on_bad_record": "skip", "shard_bytes": 600}
    prepare(sources, out=tmp_path / "data", rules=RuleSet(), **settings)
    reprocess(tmp_path / "data", shard="text/00001", inputs=[str(FORMAT_2 / "mended.jsonl")])
    wanted, found = (
        {path.relative_to(root / "data"): path for path in (root / "data").rglob("*") if path.is_file() and "manifest" not in path.name}
        for root in (FORMAT_2, tmp_path)
    )
    assert set(found) == set(wanted)
    for name, path in wanted.items():
        if name.suffix == ".parquet":
            assert pq.read_table(found[name]).equals(pq.read_table(path))
        else:
            assert found[name].read_bytes() == path.read_bytes(), name
