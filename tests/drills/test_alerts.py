"""Alerts of a real run: a killed rank is told once with what was done about it, and a receiver that is down stops nothing."""

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
from surefoot.observe.ledger import read_ledger, verify_ledger
from surefoot.observe.live import read_live
from tests.receivers import HttpReceiver

CONFIG = """
[run]
name = "alerted"
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
[alerts]
webhook = "env:DRILL_HOOK"
group_s = 0.5
repeat_s = 0.5
timeout_s = 1.0
"""
_LIMIT_S = 60.0  # against a hang


class Job:
    def __init__(self, folder: Path, *, hook: str) -> None:
        self.dir = folder / "run"
        (folder / "run.toml").write_text(CONFIG)
        (folder / "text").mkdir()
        for index in range(20):
            (folder / "text" / f"{index:02d}.txt").write_text(f"document {index}: " + "pack my box with five dozen jugs. " * 5)
        command = [sys.executable, "-m", "surefoot.cli.main", "train", "run.toml"]
        environment = {**os.environ, "DRILL_HOOK": hook, "no_proxy": "127.0.0.1"}
        silent = subprocess.DEVNULL
        self.process = subprocess.Popen(command, cwd=folder, stdout=silent, stderr=silent, env=environment)

    def entries(self, event: str) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.dir / "ledger.jsonl") if entry.event == event]

    def until(self, look: Callable[[], object], *, may_end: bool = False) -> None:
        give_up_s = time.monotonic() + _LIMIT_S
        while not look():
            assert may_end or self.process.poll() is None, "the run ended"
            assert time.monotonic() < give_up_s
            time.sleep(0.02)

    def kill_rank(self, rank: int, *, generation: int) -> None:
        """SIGKILL, once that generation has trained."""

        def is_training() -> bool:
            live = read_live(self.dir)
            return live is not None and live.generation == generation and len(live.ranks) == 2 and live.step > 0

        self.until(is_training)
        live = read_live(self.dir)
        assert live is not None
        os.kill(live.ranks[rank].pid, signal.SIGKILL)


@pytest.mark.timeout(120)
def test_a_killed_rank_is_told_once_and_a_receiver_that_is_down_stops_nothing(tmp_path: Path) -> None:
    receiver = HttpReceiver()
    job = Job(tmp_path, hook=receiver.address)
    try:
        job.kill_rank(1, generation=1)
        job.until(lambda: job.entries("alert.sent"))
        (alert,) = receiver.messages
        assert (alert["kind"], alert["severity"], alert["run"], alert["ranks"], alert["count"]) == ("rank-lost", "warn", "alerted", [1], 1)
        assert "SIGKILL" in alert["what"]
        assert alert["where"].startswith("rank 1, step ")
        assert alert["action"].startswith("restart: ")
        assert alert["command"] == f"surefoot status {job.dir}"
        assert alert["runbook"] == "runbook entry: rank-lost"

        receiver.close()
        job.kill_rank(0, generation=2)
        job.until(lambda: job.entries("alert.failed"))
        job.until(lambda: len(job.entries("generation.started")) == 3)  # nobody was told, and the run goes on
        receiver = HttpReceiver(receiver.port)
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(_LIMIT_S)
        assert [message["kind"] for message in receiver.messages] == ["rank-lost", "run-left"]
        assert receiver.messages[0]["ranks"] == [0]
        assert len(job.entries("alert.failed")) == 1
        assert "hook-with-a-secret" not in (job.dir / "ledger.jsonl").read_text() + (job.dir / "logs" / "alerter.log").read_text()
        assert verify_ledger(job.dir / "ledger.jsonl").ok
    finally:
        job.process.kill()
        job.process.wait()
        receiver.close()
