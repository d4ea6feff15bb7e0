"""`data block` on a run that trains on two ranks under its agent, one of which is killed right after: by the public commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.core.records import LedgerEntry
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.ledger import manifest_positions, read_ledger, verify_ledger
from surefoot.observe.live import read_live
from surefoot.observe.metrics import read_steps

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
num_layers = 1
d_model = 32
num_heads = 2
[train]
num_steps = 100000
global_batch_size = 4
micro_batch_size = 2
eval_interval_steps = 0
eval_num_samples = 2
[schedule]
kind = "constant"
warmup_steps = 1
[parallel]
dp_replicate = 2
[checkpoint]
interval_steps = 50
prove = false
[observe]
status_interval_s = 0.1
[launch]
threads_per_rank = 1
restart_wait_s = 0.1
"""
_LIMIT_S = 60.0  # against a hang


class Job:
    def __init__(self, folder: Path) -> None:
        self.dir = folder / "run"
        (folder / "run.toml").write_text(CONFIG)
        (folder / "text").mkdir()
        for index in range(30):
            (folder / "text" / f"{index:02d}.txt").write_text(f"document {index}: " + "how vexingly quick daft zebras jump. " * 5)
        command = [sys.executable, "-m", "surefoot.cli.main", "train", "run.toml"]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def entries(self, event: str) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.dir / "ledger.jsonl") if entry.event == event]

    def until(self, look: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + _LIMIT_S
        while not look():
            assert self.process.poll() is None, "the run ended"
            assert time.monotonic() < give_up_s
            time.sleep(0.02)

    def step(self) -> int:
        live = read_live(self.dir)
        return live.step if live is not None else 0

    def block(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "surefoot.cli.main", "data", "block", str(self.dir), *arguments, "--reason", "a drill"]
        subprocess.run(command, cwd=self.dir.parent, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL)


@pytest.mark.timeout(200)
def test_a_live_run_leaves_out_what_it_is_asked_to_and_so_does_its_next_generation(tmp_path: Path) -> None:
    job = Job(tmp_path)
    try:
        job.until(lambda: job.entries("checkpoint.committed"))
        job.block("--document", "text/3")
        job.until(lambda: job.entries("block.taken"))
        end = 4 * job.step() + 40_000  # so far off that the run cannot have passed it before it is asked
        job.block("--samples", f"{end - 40_000}:{end}")
        job.until(lambda: len(job.entries("block.taken")) == 2)
        live = read_live(job.dir)
        assert live is not None
        os.kill(live.ranks[1].pid, signal.SIGKILL)
        job.until(lambda: job.entries("replay.verified"))
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(_LIMIT_S) == 75
    finally:
        job.process.kill()
        job.process.wait()
    (verified,) = job.entries("replay.verified")
    assert verified.reason == "the same bits"
    assert [entry.attempt for entry in job.entries("block.taken")] == [1, 1]
    assert not job.entries("block.refused")
    check = verify_ledger(job.dir / "ledger.jsonl", manifests=manifest_positions(job.dir))
    assert check.ok, check
    rows = {row["step"]: row for row in read_steps(job.dir).to_pylist()}
    steps = sorted(rows)
    assert steps == list(range(1, len(steps) + 1))
    (jump,) = [step for step in steps[1:] if rows[step]["next_sample"] - rows[step - 1]["next_sample"] != 4]
    since = fold_blocks(read_ledger(job.dir / "ledger.jsonl")).blocks[1].effective_sample
    assert (rows[jump - 1]["next_sample"], rows[jump]["next_sample"]) == (since, end + 4)
