"""`surefoot triage` on run folders of every kind: empty, halted, damaged, resumed without its moments."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint.manifest import manifest_bytes, sealed
from surefoot.cli.main import run
from surefoot.cli.triage_facts import limit_of
from surefoot.cli.triage_replay import checks_of, replay_for
from surefoot.core.blocking import Block, head_of
from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.core.records import Manifest, StepReport
from surefoot.guard.incident import write_incident
from surefoot.observe.blocks import taken_fields
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from surefoot.observe.metrics import MetricsWriter
from tests.three_sources import make_run, prepare_three, record_attempt

CONFIG = '[run]\nname = "mine"\n[parallel]\ndp_replicate = 2\n'


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path / "run"
        self.path.mkdir()
        (self.path / "config.toml").write_text(CONFIG)
        self.ledger = Ledger(self.path / LEDGER_NAME, clock=ManualClock(), by="rank 0")

    def tell(self, event: Event, *, step: int = 0, attempt: int = 1, reason: str = "", rule: str = "", **fields: object) -> None:
        self.ledger.append(event, generation=1, attempt=attempt, step=step, reason=reason, rule=rule, fields=fields)

    def found(self, rule: str, *, step: int, attempt: int = 1) -> None:
        told = {"of_step": step, "asks": "skip", "onset_step": step, "evidence": {"ranks": [1]}, "action": "skipupdate"}
        self.tell(Event.ANOMALY_FOUND, step=step - 1, attempt=attempt, reason=f"{rule} fired", rule=rule, **told)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_three(tmp_path_factory.mktemp("three") / "data")


@pytest.fixture
def triage(folder: Folder, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str, code: int = 0) -> dict[str, Any]:
        assert run(["triage", str(folder.path), *arguments, "--json"]) == code
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return call


def test_a_run_that_has_not_begun_has_no_symptoms(triage: Any, folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert triage()["symptoms"] == []
    assert run(["triage", str(folder.path)]) == 0
    assert "no symptoms" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    assert run(["triage", str(tmp_path / "else")]) == 2


def test_a_halted_run_tells_its_symptoms_with_the_keys_that_others_build_on(triage: Any, folder: Folder) -> None:
    folder.tell(Event.ATTEMPT_STARTED)
    for step in (7, 8, 9):
        folder.found("nonfinite", step=step)
    folder.tell(Event.RUN_PAUSED, step=9, rule="breaker")
    answer = triage()
    assert answer["num_symptoms"] == 1
    (one,) = answer["symptoms"]
    assert set(one) >= {"name", "onset_step", "suspect", "checks", "evidence", "documents", "action"}
    assert (one["name"], one["onset_step"]) == ("nan", 7)
    assert one["action"] == f"surefoot ledger {folder.path} --tail 50"  # a loop of somebody's own
    documents = next(check for check in one["checks"] if check["name"] == "documents")
    assert documents["outcome"] == "unknown"  # it has no data of ours, and says so
    assert "no prepared data" in documents["detail"]


def test_a_step_can_be_asked_about(triage: Any, folder: Folder) -> None:
    folder.found("outlier_loss", step=7)
    assert [one["name"] for one in triage("--step", "7")["symptoms"]] == ["spike"]
    folder.tell(Event.CHECKPOINT_COMMITTED, step=90)
    assert [one["name"] for one in triage("--step", "90")["symptoms"]] == ["asked"]
    assert triage("--step", "91", code=2)["error"]["hint"] == "it reached step 90"


def test_a_damaged_ledger_is_read_up_to_its_damage(triage: Any, folder: Folder) -> None:
    folder.found("replica_differs", step=7)
    for step in (8, 9):
        folder.found("outlier_loss", step=step)
    lines = folder.ledger.path.read_bytes().splitlines(keepends=True)
    folder.ledger.path.write_bytes(lines[0] + b"not a line\n" + lines[2])
    answer = triage()
    assert [one["name"] for one in answer["symptoms"]] == ["corruption"]
    assert "damaged behind entry 1" in answer["notes"][0]


def test_a_ledger_that_was_cut_short_is_no_healthy_one(triage: Any, folder: Folder) -> None:
    for step in (1, 2, 3):
        folder.tell(Event.CHECKPOINT_COMMITTED, step=step)
    lines = folder.ledger.path.read_bytes().splitlines(keepends=True)
    path = folder.path / "checkpoints" / "s3-a1" / "manifest.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"ledger_seq": 3, "ledger_hash": json.loads(lines[2])["hash"], "id": "s3-a1"}))
    assert triage()["symptoms"] == []
    folder.ledger.path.write_bytes(b"".join(lines[:2]))
    (one,) = triage()["symptoms"]
    assert (one["name"], one["onset_step"], one["action"]) == ("ledger-cut", 2, f"surefoot ledger {folder.path} --verify")
    assert "s3-a1" in one["checks"][0]["detail"]


def test_a_config_that_cannot_be_read_is_said(triage: Any, folder: Folder) -> None:
    (folder.path / "config.toml").write_text("[nonsense")
    folder.found("outlier_loss", step=7)
    answer = triage()
    assert len(answer["symptoms"]) == 1
    assert "defaults stand for it" in answer["notes"][0]


def test_a_rebound_after_a_resume_without_its_checkpoint(triage: Any, folder: Folder) -> None:
    folder.tell(Event.ATTEMPT_STARTED, checkpoint=None)
    folder.tell(Event.RUN_RESUMED, step=100, attempt=2, checkpoint="s100-a1")
    folder.found("rebound", step=101, attempt=2)
    (one,) = triage()["symptoms"]
    assert one["checks"][0] == {"name": "moments", "outcome": "unknown", "detail": "checkpoint s100-a1 cannot be read any more"}
    assert one["action"] == f"surefoot checkpoint verify {folder.path}"


@pytest.mark.parametrize(
    ("next_samples", "outcome"),
    [([5, 10, 15], "ok"), ([5, 10, 14], "found"), ([5, 10, 15, 20, 40], "ok"), ([5, 10, 15, 20, 30], "found")],
    ids=["in a ramp", "a sample is missing", "behind a range that is skipped", "in a range that is skipped"],
)
def test_a_cursor_is_asked_what_its_step_takes(
    next_samples: list[int], outcome: str, three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of 5 up to sample 20, then of 10; samples 20 to 29 are left out."""
    run_dir = make_run(tmp_path, three)
    ledger = Ledger(run_dir / LEDGER_NAME, clock=ManualClock(), by="rank 0")
    block = Block("samples", "20:30", "skip", samples=(20, 30))
    taken = ledger.append(
        Event.BLOCK_TAKEN, generation=1, attempt=1, step=0, fields=taken_fields(block, asked=None, count=1, head=head_of([block]))
    )
    base = len(next_samples) - 1
    record_attempt(run_dir, attempt=1, base_step=0, next_samples=next_samples[:-1])
    record_attempt(run_dir, attempt=2, base_step=base, next_samples=next_samples[-1:])
    saved = Manifest(1, f"s{base}-a1", "mine", base, 1, 1, None, "t", None, 1, "", {}, "", "", {}, {}, 1, "", {"next_sample": 0}, (), ())
    saved = sealed(replace(saved, ledger_seq=taken.seq, ledger_hash=taken.hash, cursor={"next_sample": next_samples[base - 1]}))
    folder = run_dir / "checkpoints" / saved.id
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(manifest_bytes(saved))
    ledger.append(Event.RUN_RESUMED, generation=2, attempt=2, step=base, fields={"checkpoint": saved.id})
    told = {"rule": "rebound", "of_step": base + 1, "onset_step": base + 1, "asks": "alert"}
    ledger.append(Event.ANOMALY_FOUND, generation=2, attempt=2, step=base, rule="rebound", fields=told)
    assert run(["triage", str(run_dir), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["symptoms"]
    cursor = next(check for check in one["checks"] if check["name"] == "cursor")
    assert cursor["outcome"] == outcome
    (run_dir / "config.toml").write_text(CONFIG)  # without data of ours
    assert run(["triage", str(run_dir), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["symptoms"]
    assert "what a step takes is not known here" in next(check for check in one["checks"] if check["name"] == "cursor")["detail"]


def test_figures_come_from_the_rows_of_the_present_line(triage: Any, folder: Folder) -> None:
    folder.tell(Event.ATTEMPT_STARTED)
    writer = MetricsWriter(folder.path, generation=1)
    for step in range(20, 38):
        writer.write(report(step, loss=9.5 if step == 37 else 2.0))
    writer.close()
    folder.found("outlier_loss", step=37)
    (one,) = triage()["symptoms"]
    assert (one["evidence"]["loss"], one["evidence"]["loss_before"]) == (9.5, 2.0)
    assert next(check for check in one["checks"] if check["name"] == "lr-log")["outcome"] == "ok"


def report(step: int, *, loss: float) -> StepReport:
    times = dict.fromkeys(("data_wait_s", "forward_backward_s", "exchange_s", "update_s", "save_s", "evaluate_s"), 0.0)
    known = {"tokens": 100, "grad_norm": 1.0, "clip_scale": 1.0, "lr": 1e-3, "action": "proceed", "next_sample": step, "step_s": 1.0}
    return StepReport(step=step, attempt=1, generation=1, loss=loss, num_live_tokens=10, tokens_per_s=1.0, cpu_s=1.0, **known, **times)  # type: ignore[arg-type]


def test_an_incident_is_told_from_the_ledger(triage: Any, folder: Folder) -> None:
    folder.tell(Event.EPISODE_OPENED, step=41, rule="sustained_loss", reason="high", onset_step=40, detected_step=42, samples=[0, 8])
    incident = triage("--incident", "e1")["incident"]
    assert (incident["state"], incident["steps"], incident["samples"]) == ("open", [40, 42], [0, 8])
    assert triage("--incident", "e7", code=2)["error"]["hint"] == "there are e1"


def test_an_incident_holds_its_documents_where_the_data_is_at_hand(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path, three)
    record_attempt(run_dir, attempt=1, base_step=0, next_samples=[5, 10, 15])
    ledger = Ledger(run_dir / LEDGER_NAME, clock=ManualClock(), by="rank 0")
    fields: dict[str, object] = {"onset_step": 2, "detected_step": 3, "samples": [5, 15]}
    opened = ledger.append(Event.EPISODE_OPENED, generation=1, attempt=1, step=3, fields=fields)
    path = write_incident(ledger.path, opened)
    assert path is not None
    written = json.loads(path.read_text())
    assert written["documents"] is None
    assert f"surefoot triage RUN --incident e{opened.seq}" in written["documents_note"]
    assert run(["triage", str(run_dir), "--incident", f"e{opened.seq}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["incident"]
    assert told["documents"][0]["file"]
    assert "documents of samples 5 to 14" in told["documents_note"]
    assert json.loads(path.read_text()) == told
    for event, samples, keeps in ((Event.RUN_ROLLED_BACK, [5, 15], True), (Event.EPISODE_DIAGNOSED, [5, 10], False)):
        more = {"episode": f"e{opened.seq}", "samples": samples, "cause": "data", "steps": [2, 3]}
        write_incident(ledger.path, ledger.append(event, generation=1, attempt=2, step=1, fields=more))
        assert (json.loads(path.read_text())["documents"] is not None) is keeps


def test_documents_are_those_that_the_finding_was_about(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attempt 2 went back and takes other samples in steps of the same numbers."""
    run_dir = make_run(tmp_path, three)
    record_attempt(run_dir, attempt=1, base_step=0, next_samples=[5, 10, 15])
    ledger = Ledger(run_dir / LEDGER_NAME, clock=ManualClock(), by="rank 0")
    told = {"rule": "outlier_loss", "of_step": 3, "onset_step": 3, "asks": "skip"}
    ledger.append(Event.ANOMALY_FOUND, generation=1, attempt=1, step=2, rule="outlier_loss", fields=told)

    def detail() -> str:
        assert run(["triage", str(run_dir), "--json"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["symptoms"]
        return str(next(check["detail"] for check in one["checks"] if check["name"] == "documents"))

    assert "steps 2 to 3" in detail()
    record_attempt(run_dir, attempt=2, base_step=0, next_samples=[5, 20, 25])
    assert "samples 5 to 14" in detail()
    for part in (run_dir / "metrics").iterdir():
        part.unlink()
    assert detail() == "the metrics do not tell which samples step 3 took in attempt 1"


def test_the_vendors_file_has_the_evidence_and_what_is_missing_here(triage: Any, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no tool of any vendor
    folder.found("replica_differs", step=7)
    answer = triage("--vendor", "1")
    vendor = json.loads((folder.path / "incidents" / "rank-1" / "vendor.json").read_text())
    assert vendor == answer["vendor"]
    assert [one["rule"] for one in vendor["evidence"]] == ["replica_differs"]
    assert "serials and counters of GPUs: this host has no nvidia-smi" in vendor["missing"]
    assert "replica_differs fired" in (folder.path / "incidents" / "rank-1" / "vendor.md").read_text()
    assert triage("--vendor", "0")["vendor"]["evidence"] == []
    assert triage("--vendor", "2", code=2)["error"]["hint"] == "it has ranks 0 to 1"
    assert not (folder.path / "incidents" / "rank-2").exists()


def test_the_vendors_file_names_the_gpu_that_the_rank_had_or_none(
    triage: Any, folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = "".join(f'<gpu id="0:{n}:0.0"><serial>{n}</serial><uuid>GPU-{n}</uuid></gpu>' for n in range(2))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '<log>{gpus}</log>'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert triage("--vendor", "0")["vendor"]["device"] is None
    here = socket.gethostname()
    folder.tell(Event.GENERATION_STARTED, world_size=4)
    folder.tell(Event.ATTEMPT_STARTED, devices={here: {"0": [0, "GPU-1"], "1": [1, "GPU-9"]}, "node8": {"2": [0, "GPU-7"]}})
    folder.tell(Event.ATTEMPT_STARTED, attempt=2)  # as after a roll-back by an older release
    vendor = triage("--vendor", "0")["vendor"]
    assert (vendor["device"]["names"]["serial"], vendor["local_rank"]) == ("1", 0)
    for rank, words in (("1", "rank 1 had GPU-9"), ("2", "rank 2 ran on node8"), ("3", "rank 3 had is not known")):
        vendor = triage("--vendor", rank)["vendor"]
        assert vendor["device"] is None
        assert any(words in line for line in vendor["missing"]), vendor["missing"]


def test_what_a_replay_says_becomes_checks() -> None:
    layers = [
        {"module": "blocks.0", "logits": [3.0, 4.0, 900.0], "samples": [1, 2, 7]},
        {"module": "blocks.1", "logits": [2.0], "samples": [1]},
    ]
    told = checks_of({"looked_for_nonfinite": True, "first_nonfinite": None, "logits": layers})
    assert (told["nonfinite-tensor"].outcome, told["attention-head"].outcome) == ("ok", "found")
    assert "head 2 of blocks.0 has a logit of 900 in sample 7" in told["attention-head"].detail
    first = {"module": "blocks.0", "direction": "forward output", "atom": None}
    told = checks_of({"looked_for_nonfinite": True, "first_nonfinite": first, "logits": []})
    assert told["nonfinite-tensor"].detail == "module blocks.0, direction forward output"
    assert checks_of({"logits": []}) == {}
    assert replay_for([], Path("x")) == (None, {})


def test_the_oddest_of_more_documents_must_be_odder() -> None:
    assert limit_of(10) == 3.0
    assert limit_of(1000) == 5.0
    assert limit_of(0) == 2.0
