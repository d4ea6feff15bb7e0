"""`surefoot checkpoint list` and `verify`: what a person and a program get to see, and the exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.state import collect
from surefoot.cli.main import run
from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.core.records import Manifest
from surefoot.observe.ledger import Ledger
from surefoot.tensors.world import single_world


class Run:
    """A run folder that grows by commits and ledger lines, as a training makes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.ledger = Ledger(folder / "ledger.jsonl", clock=ManualClock(), by="test")
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tell(Event.ATTEMPT_STARTED, {"checkpoint": None})

    def tell(self, event: Event, fields: Mapping[str, Any], *, attempt: int = 1, step: int = 0) -> None:
        self.ledger.append(event, generation=1, attempt=attempt, step=step, fields=fields)

    def commit(self, name: str, *, step: int, attempt: int = 1, parent: str | None = None, told: bool = True) -> Manifest:
        with torch.no_grad():
            self.model.weight.fill_(step)
        seq, hash_ = self.ledger.position()
        draft = Manifest(
            format_version=1, id=name, run="test", step=step, attempt=attempt, generation=1, parent=parent, time_utc="", loss=None,
            tokens=0, state_digest="", config_hashes={}, data_hash="", code_version="0", topology={}, environment={}, ledger_seq=seq,
            ledger_hash=hash_, cursor={}, files=(), tensors=(),
        )  # fmt: skip
        manifest = save(
            self.folder / "checkpoints", draft, state=collect(self.model, self.optimizer), extras={"cursor": {}}, world=single_world()
        )
        if told:
            size = sum(file.num_bytes for file in manifest.files)
            fields = {"id": name, "step": step, "attempt": attempt, "parent": parent, "num_bytes": size}
            self.tell(Event.CHECKPOINT_COMMITTED, {**fields, "state_digest": manifest.state_digest}, attempt=attempt, step=step)
        return manifest


@pytest.fixture
def a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run(Path("run"))


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    exit_code = run(["checkpoint", *arguments, "--json"])
    return exit_code, json.loads(capsys.readouterr().out)


def test_list_has_the_keys_that_others_build_on(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = a_run.commit("s10-a1", step=10)
    exit_code, answer = _json(capsys, "list", "run")
    assert (exit_code, answer["schema_version"]) == (0, 1)
    (row,) = answer["checkpoints"]
    size = sum(file.num_bytes for file in manifest.files)
    assert row == {
        "id": "s10-a1", "step": 10, "attempt": 1, "lineage": "current", "rung": "committed", "suspect": False, "tiers": ["disk"],
        "state_digest": manifest.state_digest, "bytes": size, "path": "run/checkpoints/s10-a1",
        "read_back": False, "damaged": False, "rejected": False,
    }  # fmt: skip
    assert Path(row["path"]).is_dir()


def test_list_follows_the_lineage_and_not_the_steps(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    a_run.commit("s10-a1", step=10)
    a_run.commit("s20-a1", step=20, parent="s10-a1")
    a_run.tell(Event.RUN_ROLLED_BACK, {"checkpoint": "s10-a1"}, attempt=2, step=10)
    a_run.commit("s15-a2", step=15, attempt=2, parent="s10-a1")
    a_run.commit("s18-a2", step=18, attempt=2, parent="s15-a2", told=False)
    _, answer = _json(capsys, "list", "run")
    assert [(row["id"], row["lineage"]) for row in answer["checkpoints"]] == [
        ("s10-a1", "current"),
        ("s20-a1", "abandoned"),
        ("s15-a2", "current"),
        ("s18-a2", "current"),
    ]


def test_list_tells_of_what_is_on_disk_only(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert _json(capsys, "list", "run") == (0, {"schema_version": 1, "checkpoints": []})
    a_run.commit("s10-a1", step=10)
    (a_run.folder / "checkpoints" / "s10-a1").rename(a_run.folder / "checkpoints" / ".s10-a1.g1.retired")
    assert _json(capsys, "list", "run")[1]["checkpoints"] == []


def test_list_survives_a_manifest_that_cannot_be_read(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    a_run.commit("s10-a1", step=10, told=False)
    (a_run.folder / "checkpoints" / "s10-a1" / "manifest.json").write_text("{")
    (row,) = _json(capsys, "list", "run")[1]["checkpoints"]
    assert (row["id"], row["step"], row["lineage"]) == ("s10-a1", 10, "abandoned")


def test_list_tells_what_others_found(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for step, parent in ((10, None), (20, "s10-a1"), (30, "s20-a1")):
        a_run.commit(f"s{step}-a1", step=step, parent=parent)
    a_run.tell(Event.CHECKPOINT_VERIFIED, {"id": "s10-a1", "host": "n1", "by": "uploader"})
    a_run.tell(Event.CHECKPOINT_PROVEN, {"id": "s10-a1", "host": "n2", "world_size": 3})
    a_run.tell(Event.CHECKPOINT_DAMAGED, {"id": "s20-a1", "problems": [{"kind": "wrong-checksum", "file": "__0_0.distcp", "detail": "x"}]})
    a_run.tell(Event.CHECKPOINT_COPIED, {"id": "s10-a1", "tier": "s3://b/p"})
    rows = _json(capsys, "list", "run", "--shards")[1]["checkpoints"]
    assert [(row["rung"], row["read_back"], row["damaged"], row["tiers"]) for row in rows] == [
        ("proven", True, False, ["disk", "s3://b/p"]),
        ("committed", False, True, ["disk"]),
        ("committed", False, False, ["disk"]),
    ]
    assert {(shard["verdict"], shard["verifier"], shard["verified_on"], shard["look"]) for shard in rows[0]["shards"]} == {
        ("ok", "test", "n2", "proven")
    }
    assert {shard["file"]: shard["verdict"] for shard in rows[1]["shards"]} == {
        ".metadata": "unknown",
        "__0_0.distcp": "damaged",
        "extras.json": "unknown",
    }
    assert run(["checkpoint", "list", "run", "--shards"]) == 0
    printed = capsys.readouterr().out
    assert "damaged  written by rank 0 on" in printed
    assert "nobody looked yet" in printed


def test_list_marks_what_a_window_got_into_and_names_a_way_back(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for step, parent in ((10, None), (20, "s10-a1"), (30, "s20-a1"), (40, "s30-a1")):
        a_run.commit(f"s{step}-a1", step=step, parent=parent)
    a_run.tell(Event.CHECKPOINT_PROVEN, {"id": "s10-a1", "host": "n2", "world_size": 3})
    _, answer = _json(capsys, "list", "run", "--window", "25:33")
    assert [row["contaminated"] for row in answer["checkpoints"]] == [False, False, True, True]
    window = answer["window"]
    assert (window["first_step"], window["last_step"], window["affected"]) == (25, 33, ["s30-a1", "s40-a1"])
    assert (window["newest_clean"]["id"], window["newest_clean"]["cost_steps"]) == ("s20-a1", 20)
    assert (window["choice"]["id"], window["choice"]["cost_steps"]) == ("s10-a1", 30)
    assert run(["checkpoint", "list", "run", "--window", "25:33"]) == 0
    assert "go back to s10-a1" in capsys.readouterr().out


@pytest.mark.parametrize("window", ["25", "9:3", "0:3", "a:b"])
@pytest.mark.usefixtures("a_run")
def test_a_window_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str], window: str) -> None:
    exit_code, answer = _json(capsys, "list", "run", "--window", window)
    assert (exit_code, answer["error"]["where"]) == (2, "--window")


def test_verify_of_a_folder_and_of_a_run(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    a_run.commit("s10-a1", step=10)
    a_run.commit("s20-a1", step=20, parent="s10-a1")
    for argument in ("run", "run/checkpoints/s20-a1"):
        exit_code, answer = _json(capsys, "verify", argument)
        assert exit_code == 0
        assert answer == {"schema_version": 1, "ok": True, "path": "run/checkpoints/s20-a1", "problems": []}
    assert run(["checkpoint", "verify", "run"]) == 0
    assert "ok: run/checkpoints/s20-a1: 3 files" in capsys.readouterr().out


def test_verify_names_the_damage_and_exits_1(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    a_run.commit("s10-a1", step=10)
    os.truncate("run/checkpoints/s10-a1/__0_0.distcp", 100)
    exit_code, answer = _json(capsys, "verify", "run")
    assert (exit_code, answer["ok"]) == (1, False)
    first = answer["problems"][0]
    assert set(first) == {"kind", "file", "tensor", "detail"}
    assert (first["kind"], first["file"]) == ("wrong-size", "__0_0.distcp")
    assert run(["checkpoint", "verify", "run"]) == 1
    assert "wrong-size __0_0.distcp" in capsys.readouterr().out


def test_the_ledger_remembers_damage_until_a_look_finds_it_well_again(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    a_run.commit("s10-a1", step=10)
    file = Path("run/checkpoints/s10-a1/__0_0.distcp")
    whole = file.read_bytes()
    for content, damaged in ((whole[:-1], True), (whole, False)):
        file.write_bytes(content)
        assert _json(capsys, "verify", "run")[0] == damaged
        assert [row["damaged"] for row in _json(capsys, "list", "run")[1]["checkpoints"]] == [damaged]


def test_a_rejected_checkpoint_is_listed_as_one(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    a_run.commit("s10-a1", step=10)
    a_run.tell(Event.CHECKPOINT_PROVEN, {"id": "s10-a1", "host": "n2", "world_size": 3})
    a_run.tell(Event.CHECKPOINT_REJECTED, {"id": "s10-a1"})
    assert [row["rejected"] for row in _json(capsys, "list", "run")[1]["checkpoints"]] == [True]
    assert run(["checkpoint", "list", "run"]) == 0
    assert "proven rejected" in capsys.readouterr().out


def test_verify_of_a_run_compares_with_the_ledger(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Another checkpoint, whole in itself, under the name of the newest: only the ledger knows."""
    a_run.commit("s10-a1", step=10)
    a_run.commit("s20-a1", step=20, parent="s10-a1")
    root = a_run.folder / "checkpoints"
    (root / "s20-a1").rename(root / "kept")
    (root / "s10-a1").rename(root / "s20-a1")
    exit_code, answer = _json(capsys, "verify", "run")
    assert exit_code == 1
    assert "the ledger says" in answer["problems"][0]["detail"]


def test_verify_misses_a_newest_that_is_gone(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    a_run.commit("s10-a1", step=10)
    (a_run.folder / "checkpoints" / "s10-a1").rename(a_run.folder / "gone")
    exit_code, answer = _json(capsys, "verify", "run")
    assert exit_code == 1
    assert answer["problems"][0]["kind"] == "missing-file"


def test_a_run_that_is_being_made_has_no_checkpoint_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    assert _json(capsys, "list", str(tmp_path))[1]["checkpoints"] == []
    exit_code, answer = _json(capsys, "verify", str(tmp_path))
    assert (exit_code, answer["error"]["what"]) == (2, "this run has no checkpoint yet")


def test_verify_of_a_bare_copy(a_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    a_run.commit("s10-a1", step=10)
    (a_run.folder / "checkpoints" / "s10-a1").rename("copy")
    assert _json(capsys, "verify", "copy")[1]["ok"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "absent"], "no such run folder"),
        (["list", "."], "not a run"),
        (["verify", "absent"], "no such folder"),
        (["verify", "run"], "no checkpoint yet"),
        (["verify", "."], "neither a run folder nor a checkpoint folder"),
    ],
)
@pytest.mark.usefixtures("a_run")
def test_a_wrong_place_is_a_usage_error(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    exit_code, answer = _json(capsys, *arguments)
    assert exit_code == 2
    assert words in answer["error"]["what"]
    assert answer["error"]["hint"]
