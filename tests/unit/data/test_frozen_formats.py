"""Every released format stays readable, and a run that began under it goes on with the same samples. Never write these files anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from surefoot.core.sections import SourceSection
from surefoot.data.loader import ShardedLoader
from surefoot.data.manifest import SPLITS, load_manifest
from surefoot.data.prepare import prepare
from surefoot.data.tokenizer import load_tokenizer

FORMAT_1 = Path(__file__).parent / "frozen" / "format1"


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
