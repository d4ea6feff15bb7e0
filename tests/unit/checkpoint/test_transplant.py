"""A checkpoint of one run as a checkpoint of another: the same bits under another manifest, whole or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint.manifest import FORMAT_VERSION, read_manifest
from surefoot.checkpoint.transplant import free_id, transplant
from surefoot.checkpoint.verify import verify
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete
from surefoot.core.records import Manifest

FROZEN = Path(__file__).parents[2] / "fixtures" / "checkpoint_v1" / "s4-a1"

Move = Callable[..., Manifest]


@pytest.fixture
def move(tmp_path: Path) -> Move:
    def call(source: Path = FROZEN, **given: Any) -> Manifest:
        values: dict[str, Any] = {"checkpoint": "s4-a0", "run": "new", "generation": 3, "ledger_seq": 7, "ledger_hash": "cc"} | given
        return transplant(source, tmp_path / "checkpoints", **values)

    return call


def test_the_bits_stay_and_the_manifest_is_of_the_new_run(move: Move, tmp_path: Path) -> None:
    new, old = move(), read_manifest(FROZEN)
    folder = tmp_path / "checkpoints" / "s4-a0"
    assert read_manifest(folder) == new
    assert (new.id, new.attempt, new.run, new.generation, new.parent) == ("s4-a0", 0, "new", 3, None)
    assert (new.ledger_seq, new.ledger_hash, new.format_version) == (7, "cc", FORMAT_VERSION)
    assert (new.state_digest, new.tensors, new.step, new.cursor) == (old.state_digest, old.tensors, old.step, old.cursor)
    assert verify(folder) == []
    assert [entry.name for entry in folder.parent.iterdir()] == ["s4-a0"]


def test_removing_one_leaves_the_other(move: Move, tmp_path: Path) -> None:
    source = Path(shutil.copytree(FROZEN, tmp_path / "s4-a1"))
    move(source)
    shutil.rmtree(source)
    assert verify(tmp_path / "checkpoints" / "s4-a0") == []


def test_a_copy_is_compared_on_the_way(move: Move, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", no_links)
    source = Path(shutil.copytree(FROZEN, tmp_path / "s4-a1"))
    move(source)
    assert verify(tmp_path / "checkpoints" / "s4-a0") == []
    content = bytearray((source / "__0_0.distcp").read_bytes())
    content[1000] ^= 1
    (source / "__0_0.distcp").write_bytes(content)
    with pytest.raises(Corrupt, match=r"__0_0\.distcp"):
        move(source, checkpoint="s4-a0-r1")
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["s4-a0"]


def test_nothing_is_replaced_and_nothing_is_left(move: Move, tmp_path: Path) -> None:
    move()
    with pytest.raises(CheckpointError, match="exists already"):
        move()
    with pytest.raises(Incomplete):
        move(tmp_path, checkpoint="s5-a0")
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["s4-a0"]


def test_an_id_from_outside_meets_none() -> None:
    assert free_id(5, taken=()) == "s5-a0"
    assert free_id(5, taken={"s5-a0", "s5-a0-r1"}) == "s5-a0-r2"


def test_what_a_link_leads_to_is_taken_and_not_the_link(move: Move, tmp_path: Path) -> None:
    kept = Path(shutil.copytree(FROZEN, tmp_path / "blobs"))
    source = tmp_path / "s4-a1"
    source.mkdir()
    for file in kept.iterdir():
        (source / file.name).symlink_to(file)
    move(source)
    shutil.rmtree(kept)
    assert verify(tmp_path / "checkpoints" / "s4-a0") == []
