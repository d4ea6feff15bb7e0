"""What fills up a shard that was made anew is no document: the report, the windows and the look-ahead do not know it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from surefoot.cli import main
from surefoot.core.sections import RunConfig, SourceSection
from surefoot.data.manifest import Manifest
from surefoot.data.prepare import prepare
from surefoot.data.quality.look import baselines
from surefoot.data.quality.look_ahead import LookAhead
from surefoot.data.quality.minhash import signatures
from surefoot.data.quality.repeats import near_copies
from surefoot.data.quality.rules import RuleSet
from surefoot.data.quality.siblings import siblings
from surefoot.data.quality.stored import Shelf
from surefoot.data.quality.window import window_report
from surefoot.data.recipe import run_order
from surefoot.data.reprocess import reprocess
from tests.unit.data.quality.prose import prose

SEQ_LEN = 64


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """A source of three shards, two of which are mostly padding."""
    folder = tmp_path_factory.mktemp("padded")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": prose(3, seed=number)}) + "\n" for number in range(60)))
    (folder / "b.jsonl").write_text(json.dumps({"text": "broken"})[:-2] + "\n" + json.dumps({"text": prose(3, seed=999)}) + "\n")
    source = SourceSection(name="web", files=(str(folder / "a.jsonl"),))
    data = folder / "data"
    made = prepare([source], out=data, tokenizer="bytes", heldout_fraction=0.0, shard_bytes=6000, workers=1)
    assert len(made.split("web", "train").shards) > 2
    for shard in ("web/00000", "web/00001"):
        made = reprocess(data, shard=shard, inputs=[str(folder / "b.jsonl")], on_bad_record="skip", workers=1)
    assert sum(one.padded_tokens > 0 for one in made.replaced) == 2
    return data, made


def test_a_report_knows_no_padding(padded: tuple[Path, Manifest], capsys: pytest.CaptureFixture[str]) -> None:
    data, manifest = padded
    # As prepare leaves it where records were left out: rates by file are asked for.
    rejects = [{"file": "(padding)", "line": 0}, *({"file": "a.jsonl", "line": line} for line in range(1, 40))]
    (data / "web" / "rejects.jsonl").write_text("".join(json.dumps(reject) + "\n" for reject in rejects))
    assert main.run(["data", "report", str(data), "--json"]) == 0
    printed = capsys.readouterr().out
    web = json.loads(printed)["sources"]["web"]
    assert web["documents"] == web["looked_at"]["documents"] == web["lengths"]["documents"] == web["near_copies"]["compared"]
    assert web["documents"] == manifest.split("web", "train").docs - 2 == json.loads(printed)["totals"]["documents"]
    assert web["padded_tokens"] == sum(one.padded_tokens for one in manifest.replaced)
    assert web["near_copies"]["copies"] == 0
    padding = f"web/{manifest.split('web', 'train').shards[0].docs - 1}"
    assert main.run(["data", "rules", "propose", str(data), "--document", padding]) == 2
    assert "00000-r1 up, and no document" in capsys.readouterr().err
    assert "(padding)" not in json.dumps([web["lengths"], web["rules"], web["near_copies"], web["checks"]])


def test_a_window_and_the_look_ahead_know_no_padding(padded: tuple[Path, Manifest], tmp_path: Path) -> None:
    data, manifest = padded
    config = RunConfig()
    order = run_order(manifest, replace(config, data=replace(config.data, seq_len=SEQ_LEN)))
    rows = manifest.split("web", "train").tokens // SEQ_LEN
    with Shelf(data) as shelf:
        usual = baselines(shelf, seq_len=SEQ_LEN, rules=RuleSet(), off={})
        window = window_report(shelf, order, np.arange(rows), rules=RuleSet(), off={}, usual=usual)
        ahead = LookAhead(tmp_path, rules=RuleSet(), off={}, num_samples=rows)
        judged = []
        while (found := ahead.step(shelf, order, next_sample=0, end_sample=rows, steps_of=lambda samples: samples.tolist())) is not None:
            judged += found
        alike = siblings(shelf, np.zeros_like(signatures([shelf.tokens(shelf.document("web", 0).span)])), min_similarity=0.5)
    assert usual["web"].num_documents == shelf.num_documents("web") - 2 == window["looked_at"]["documents"]
    assert {one["file"] for one in window["documents"]} == {"a.jsonl", "b.jsonl"}
    assert manifest.tokenizer.eos_id not in [token["id"] for token in window["tokens"]]
    assert judged == []
    assert alike == []


def test_signatures_that_are_computed_leave_it_out_too(padded: tuple[Path, Manifest], tmp_path: Path) -> None:
    data, manifest = padded
    train = tmp_path / "web" / "train"
    train.mkdir(parents=True)
    for file in (data / "web" / "train").iterdir():
        if file.suffix != ".sig":
            (train / file.name).symlink_to(file)
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(data / name)
    with Shelf(tmp_path) as shelf:
        assert near_copies(shelf, "web").num_compared == manifest.split("web", "train").docs - 2
