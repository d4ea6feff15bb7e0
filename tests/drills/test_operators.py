"""Orders by the public commands to a run that trains on two ranks under its agent, one of which is killed in a pause."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.core.records import LedgerEntry
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.control import CONTROL_NAME
from surefoot.observe.ledger import manifest_positions, read_ledger, verify_ledger
from surefoot.observe.live import read_live

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
interval_steps = 90000
prove = false
[observe]
status_interval_s = 0.1
ledger_look_s = 0.1
[launch]
threads_per_rank = 1
restart_wait_s = 0.1
"""
_LIMIT_S = 60.0  # against a hang


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder, self.dir = folder, folder / "run"
        (folder / "run.toml").write_text(CONFIG)
        (folder / "text").mkdir()
        for index in range(30):
            (folder / "text" / f"{index:02d}.txt").write_text(f"document {index}: " + "how vexingly quick daft zebras jump. " * 5)
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "surefoot.cli.main", "train", "run.toml"]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def entries(self, *events: str) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.dir / "ledger.jsonl") if entry.event in events]

    def until(self, look: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + _LIMIT_S
        while not look():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < give_up_s
            time.sleep(0.02)

    def step(self) -> int:
        live = read_live(self.dir)
        return live.step if live is not None else 0

    def phases(self) -> set[str]:
        live = read_live(self.dir)
        return {rank.phase for rank in live.ranks} if live is not None else set()

    def order(self, verb: str, *arguments: str, code: int = 0) -> Any:
        """From this process, which is none of the run's."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            ended = run([verb, str(self.dir), "--json", *arguments])
        assert ended == code, said.getvalue()
        return json.loads(said.getvalue())

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=_LIMIT_S)
        return self.process.returncode, said.decode()


@pytest.mark.timeout(200)
def test_a_live_run_follows_its_operators_and_a_pause_outlives_its_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path)
    try:
        job.until(lambda: job.step() > 5)
        saved = job.order("save", "--reason", "a look")["checkpoint"]
        assert saved["rung"] in ("committed", "loadable")
        with (job.dir / CONTROL_NAME).open("ab") as control:
            control.write(b'{"torn')
        paused = job.order("pause", "--reason", "coffee")
        assert paused["limit_s"] == 600
        at = job.step()
        job.until(lambda: job.phases() == {"stopped"})
        assert job.order("save")["checkpoint"]["id"] == paused["checkpoint"]["id"]
        assert job.order("resume", "--cause", "it was good")["released"]
        job.until(lambda: job.step() > at + 5)
        first = saved["step"] + 3
        back = job.order("rollback", "--to", str(saved["step"] + 1), "--skip", f"{first}:{first + 2}", "--yes")
        assert (back["step"], back["checkpoint"]["id"]) == (saved["step"], saved["id"])
        (block,) = fold_blocks(read_ledger(job.dir / "ledger.jsonl")).blocks
        assert (block.samples, block.effective_sample) == ((4 * (first - 1), 4 * (first + 1)), 4 * saved["step"])
        job.until(lambda: job.entries("replay.verified"))
        job.order("pause", "--reason", "again")
        live = read_live(job.dir)
        assert live is not None
        os.kill(live.ranks[1].pid, signal.SIGKILL)
        code, said = job.ended()
        assert code == 6, said
        assert "paused" in said
        job.process = job.start()  # who starts it again is told so
        assert job.ended()[0] == 6
        job.order("stop", code=2)
        job.order("resume")
        job.process = job.start()
        job.until(lambda: len(job.entries("attempt.started")) > 2 and job.step() > at)
        stopped = job.order("stop", "--reason", "enough")
        code, said = job.ended()
        assert (code, stopped["checkpoint"]["step"]) == (6, stopped["step"])
        assert "enough" in said
    finally:
        job.process.kill()
        job.process.wait()
    taken = [entry.fields["verb"] for entry in job.entries("order.taken")]
    assert taken == ["save", "pause", "save", "resume", "rollback", "pause", "stop"]
    assert len(job.entries("order.refused")) == 1  # the torn line
    assert {entry.by for entry in job.entries("order.taken")} == {"rank 0"}
    check = verify_ledger(job.dir / "ledger.jsonl", manifests=manifest_positions(job.dir))
    assert check.ok, check
