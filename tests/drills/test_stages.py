"""Stages through the real command: another mixture, then longer sequences under another base; killed in the middle, changed later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import read_ledger
from surefoot.observe.live import read_live
from surefoot.observe.metrics import read_steps

CONFIG = """
[run]
dir = "{name}"
[data]
path = "prepared"
tokenizer = "bytes"
seq_len = 32
[[data.sources]]
name = "web"
files = ["web"]
[[data.sources]]
name = "code"
files = ["code"]
weight = 0
[model]
num_layers = 1
d_model = 32
num_heads = 2
[train]
num_steps = 160
global_batch_size = 4
micro_batch_size = 2
eval_interval_steps = 8   # each save has its held-out loss
eval_num_samples = 2
[schedule]
kind = "constant"
warmup_steps = 1
[parallel]
dp_replicate = 2
[checkpoint]
interval_steps = 8
num_slots = 8   # so many that no save is put off to a later step, however busy the machine is
keep_last = 9
prove = false
[observe]
status_interval_s = 0.1
[launch]
threads_per_rank = 1
restart_wait_s = 0.1
"""
STAGES = """
[[stage]]
first_sample = 41
weights = { web = 1, code = 1 }
lr = 1e-4
[[stage]]
first_sample = 203
seq_len = 64
rope_base = 5e5
global_batch_size = 6
lr = 5e-5
"""
AS_GIVEN = (
    "{first_sample = 41, weights = {web = 1, code = 1}, lr = 1e-4}, "
    "{first_sample = 203, seq_len = 64, rope_base = 5e5, global_batch_size = 6, lr = 5e-5}"
)
LAST_OF_FIRST = 11  # steps of 4 samples: the eleventh begins at sample 40, the twelfth in the second stage
LAST_BEFORE_EDGE = 51  # from 200 to the edge at 203: three samples
NUM_SAMPLES = 203 + (160 - LAST_BEFORE_EDGE) * 6

pytestmark = pytest.mark.timeout(300)  # several starts of Python and torch each


class Run:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.dir, self.config = folder, folder / name, folder / f"{name}.toml"
        self.config.write_text(CONFIG.format(name=name) + STAGES)
        if not (folder / "web").exists():
            (folder / "web").mkdir()
            (folder / "code").mkdir()
            for index in range(30):
                (folder / "web" / f"{index:02d}.txt").write_text(f"document {index}: " + "how vexingly quick daft zebras jump. " * 6)
                (folder / "code" / f"{index:02d}.txt").write_text(f"def f{index}(x):\n    return x + {index}\n" * 9)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "surefoot.cli.main", "train", str(self.config), *arguments]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def train(self, *arguments: str, expect: int = 0) -> str:
        process = self.start(*arguments)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == expect, printed
        return printed

    def entries(self, event: str) -> list[LedgerEntry]:
        path = self.dir / "ledger.jsonl"
        return [entry for entry in read_ledger(path) if entry.event == event] if path.exists() else []

    def digest(self) -> str:
        return str(self.entries("run.finished")[-1].fields["state_digest"])

    def kill_after(self, step: int) -> str:
        """SIGKILL to a rank once a checkpoint behind `step` is on disk; the run goes on to its end. What it printed."""
        process, deadline_s = self.start(), time.monotonic() + 100
        while not any(entry.step > step for entry in self.entries("checkpoint.committed")):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.01)
        live = read_live(self.dir)
        assert live is not None
        os.kill(live.ranks[0].pid, signal.SIGKILL)
        printed, _ = process.communicate(timeout=100)
        assert process.returncode == 0, printed
        return printed


def test_a_run_over_stages_is_the_same_killed_or_not_and_stages_to_come_may_change(tmp_path: Path) -> None:
    whole, killed = Run(tmp_path, "whole"), Run(tmp_path, "killed")
    whole.train()
    steps = {row["step"]: row for row in read_steps(whole.dir).to_pylist()}
    assert steps[LAST_BEFORE_EDGE]["next_sample"] == 203
    assert steps[160]["next_sample"] == NUM_SAMPLES
    rates = [steps[step]["lr"] for step in (LAST_OF_FIRST, LAST_OF_FIRST + 1, LAST_BEFORE_EDGE, LAST_BEFORE_EDGE + 1)]
    assert rates == pytest.approx([3e-4, 1e-4, 1e-4, 5e-5])

    printed = killed.kill_after(LAST_BEFORE_EDGE)
    assert len(killed.entries("attempt.started")) == 2
    assert "canary verified" in printed  # the held-out loss of the restored weights, under the base they were trained with
    assert not killed.entries("checkpoint.rejected")
    assert killed.digest() == whole.digest()

    more = ("train.num_steps=170", "--accept-changes", "train")
    behind = killed.train(*more, "stage=[{first_sample = 41, lr = 9e-5}]", expect=2)
    assert f"the stages differ from sample 41 on, and the run goes on at sample {NUM_SAMPLES}" in " ".join(behind.split())
    assert not killed.entries("stage.changed")
    to_come = f"{{first_sample = {NUM_SAMPLES + 2}, weights = {{code = 1}}, lr = 1e-5}}"
    killed.train(*more, f"stage=[{AS_GIVEN}, {to_come}]")
    (changed,) = killed.entries("stage.changed")
    assert changed.fields["effective_sample"] == NUM_SAMPLES + 2
    assert "stage[2].weights was absent, is {'code': 1.0}" in changed.reason
    last = {row["step"]: row for row in read_steps(killed.dir).to_pylist()}
    assert [last[step]["lr"] for step in (161, 162)] == pytest.approx([5e-5, 1e-5])
