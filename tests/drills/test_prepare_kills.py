"""Preparing data through kill -9: the same command goes on from what is finished and ends in the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.core.sections import SourceSection
from surefoot.data.prepare import prepare

# Small chunks and shards, so that a small corpus has many of them. argv: corpus, out.
PREPARE = """
import logging, sys
from surefoot.core.sections import SourceSection
from surefoot.data import prepare as preparing

logging.basicConfig(level=logging.WARNING)
preparing.paced = lambda tell: tell  # every chunk is told, not every two seconds
sources = [SourceSection(name=name, files=(f"{sys.argv[1]}/{name}.*",)) for name in ("web", "code")]
preparing.prepare(
    sources, out=sys.argv[2], tokenizer="bpe:400", heldout_fraction=0.1, workers=2, chunk_bytes=4_000, shard_bytes=60_000,
    progress=lambda progress: print(progress.stage, progress.done_bytes, flush=True),
)
"""
LIMIT_S = 60.0


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    web, code = (
        [f"{name} {number} " + "some words of a document " * (number * 7 % 11) for number in range(num_documents)]
        for name, num_documents in (("web", 1500), ("code", 700))
    )
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in web))
    pq.write_table(pa.table({"text": code}), folder / "code.parquet", row_group_size=40)
    return folder


@pytest.fixture
def wanted(corpus: Path, tmp_path: Path) -> dict[str, bytes]:
    """What one process makes of it undisturbed."""
    sources = [SourceSection(name=name, files=(str(corpus / f"{name}.*"),)) for name in ("web", "code")]
    prepare(sources, out=tmp_path / "whole", tokenizer="bpe:400", heldout_fraction=0.1, workers=1, shard_bytes=60_000)
    return bytes_of(tmp_path / "whole")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def note(out: Path, name: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads((out.with_name(f".{out.name}.preparing") / "work" / f"{name}.json").read_bytes())["value"]
        return value
    except FileNotFoundError:
        return {}


@contextmanager
def preparing(corpus: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PREPARE, str(corpus), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_when(corpus: Path, out: Path, moment: Callable[[], bool]) -> None:
    """SIGKILL, as soon as `moment` holds."""
    give_up_s = time.monotonic() + LIMIT_S
    with preparing(corpus, out) as process:
        while not moment():
            assert process.poll() is None, f"it ended before: {process.stderr.read() if process.stderr else ''}"
            assert time.monotonic() < give_up_s
            time.sleep(0.001)
        process.kill()


def finish(corpus: Path, out: Path) -> tuple[str, str]:
    """Let it end; what it told, and its warnings."""
    with preparing(corpus, out) as process:
        told, warned = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, warned
    return told, warned


def num_written(out: Path, source: str) -> int:
    return int(note(out, f"{source}/written").get("num_chunks", 0))


def test_killed_again_and_again_it_ends_in_the_same_bytes(corpus: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    hidden = tmp_path / ".out.preparing"
    moments: list[Callable[[], bool]] = [
        lambda: bool(note(out, "web/survey")),
        lambda: bool(note(out, "code/survey")),
        lambda: bool(note(out, "trained")),
        lambda: num_written(out, "web") >= 8,
        lambda: num_written(out, "web") >= 24,
        lambda: (hidden / "data" / "web" / "train" / "00001.src.parquet").exists(),
        lambda: num_written(out, "code") >= 8,
    ]
    for moment in moments:
        kill_when(corpus, out, moment)
        assert not out.exists()
    before = num_written(out, "code")
    told, warned = finish(corpus, out)
    assert bytes_of(out) == wanted
    assert warned == ""
    assert told.splitlines()[0].startswith("tokenizing"), "it read again what was read"
    assert before >= 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "whole"]


@pytest.mark.parametrize("damage", ["tokens", "rows", "note", "input"])
def test_what_changed_since_the_kill_is_noticed_and_it_begins_anew(
    damage: str, corpus: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_when(corpus, out, lambda: num_written(out, "web") >= 16)
    hidden = tmp_path / ".out.preparing"
    match damage:
        case "tokens":
            (victim,) = [path for path in (hidden / "data" / "web" / "train").glob("*.tok") if not path.with_suffix(".len").exists()]
            flip(victim, offset=5000)
        case "rows":
            flip(hidden / "work" / "web" / "survey.rows", offset=50)
        case "note":
            flip(hidden / "work" / "web" / "written.json", offset=20)
        case "input":
            (corpus / "web.jsonl").write_bytes((corpus / "web.jsonl").read_bytes())
    told, warned = finish(corpus, out)
    assert bytes_of(out) == wanted
    assert "it begins anew" in warned
    assert "reading 0" in told.splitlines()


def flip(path: Path, *, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
