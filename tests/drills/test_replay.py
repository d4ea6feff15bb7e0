"""`replay` of a real run on two ranks that was killed, skipped an update for a fault that is over, and left samples out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import read_ledger

CONFIG = """
[run]
name = "run"
dir = "run"
[data]
path = "prepared"
tokenizer = "bytes"
seq_len = 32
[[data.sources]]
name = "text"
files = ["text"]
[model]
factory = "faulty_model:build"
num_layers = 2
d_model = 32
num_heads = 2
[train]
num_steps = 22
global_batch_size = 4
micro_batch_size = 2
eval_interval_steps = 0
eval_num_samples = 2
[schedule]
kind = "constant"
warmup_steps = 1
[heal]
recheck = false
[parallel]
dp_replicate = 2
[checkpoint]
interval_steps = 4
num_slots = 8
keep_last = 9
prove = false
[launch]
threads_per_rank = 1
restart_wait_s = 0.1
"""
FAULTS = {"nan": [1, 7], "kill": [1, 11]}
_LIMIT_S = 100.0  # against a hang


@pytest.fixture
def in_drills(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment in which processes find the factory; a replay is started from here, without the faults."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return {**os.environ, "FAULTS": json.dumps(FAULTS)}


@pytest.fixture
def replayed(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(*arguments: str, expect: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        code = run(["replay", *arguments, "--json"])
        printed = capsys.readouterr()
        assert code == expect, printed
        answer: dict[str, Any] = json.loads(printed.out)
        return answer

    return call


@pytest.mark.timeout(200)
def test_a_run_with_a_kill_a_skip_and_a_block_is_repeated_and_without_one_of_them_it_is_not(
    tmp_path: Path, in_drills: dict[str, str], replayed: Callable[..., dict[str, Any]]
) -> None:
    folder = tmp_path / "run"
    write_texts(tmp_path / "text")
    (tmp_path / "run.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "surefoot.cli.main", "train", "run.toml"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=in_drills)
    until(lambda: of(folder, "run.created"))
    assert run(["data", "block", str(folder), "--samples", "60:72", "--reason", "a drill"]) == 0
    printed, _ = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 0, printed
    (skip,) = of(folder, "update.skipped")
    (block,) = of(folder, "block.taken")
    assert (skip.step, skip.attempt, len(of(folder, "attempt.started"))) == (7, 1, 2)
    before = snapshot(folder)

    whole = replayed(str(folder), "--from", "5", "--steps", "17", "--name-nonfinite", "--logits")
    assert whole["same"] is True
    assert whole["start"] == {"checkpoint": "s4-a1", "step": 4}
    assert (whole["num_compared"], whole["did_not_recur"], whole["notes"], whole["first_nonfinite"]) == (18, [7], [], None)
    assert [(one["step"], one["module"], len(one["logits"])) for one in whole["logits"]][:2] == [
        (6, "blocks.0.attention.core", 2),
        (6, "blocks.1.attention.core", 2),
    ]
    assert len(whole["logits"]) == 2 * 17

    less = replayed(str(folder), "--from", "5", "--steps", "17", "--without", str(skip.seq), expect=1)
    assert (less["first_difference"]["step"], less["first_difference"]["what"]) == (7, "action")
    assert less["num_differing"] == 16  # from there on everything is another
    less = replayed(str(folder), "--from", "14", "--steps", "4", "--without", str(block.seq), expect=1)
    assert less["start"]["step"] <= block.step
    assert (less["first_difference"]["step"], less["first_difference"]["what"]) == (16, "next_sample")
    assert less["first_difference"]["recorded"] == 76
    assert snapshot(folder) == before


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for index in range(30):
        (folder / f"{index:02d}.txt").write_text(f"document {index}: " + "how vexingly quick daft zebras jump. " * 5)


def of(folder: Path, event: str) -> list[LedgerEntry]:
    path = folder / "ledger.jsonl"
    return [entry for entry in read_ledger(path) if entry.event == event] if path.exists() else []


def until(look: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + _LIMIT_S
    while not look():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of the run, but for its logs and what a block leaves beside them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
