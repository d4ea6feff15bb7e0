"""A run of two ranks under its agent that goes on until a drill ends it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import read_ledger
from surefoot.observe.live import read_live

LIMIT_S: Final = 60.0  # against a hang

CONFIG: Final = """
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


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for index in range(30):
        (folder / f"{index:02d}.txt").write_text(f"document {index}: " + "how vexingly quick daft zebras jump. " * 5)


class LiveJob:
    """`process` is its agent. What that says goes to a file, so that no pipe fills up."""

    def __init__(self, folder: Path, *, config: str = CONFIG, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self.dir = folder, folder / "run"
        self._environment = {**os.environ, **(environment or {})}
        (folder / "run.toml").write_text(config)
        write_texts(folder / "text")
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "surefoot.cli.main", "train", "run.toml"]
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=said, env=self._environment)

    def entries(self, *events: str) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.dir / "ledger.jsonl") if entry.event in events]

    def until(self, look: Callable[[], object], *, may_end: bool = False) -> None:
        give_up_s = time.monotonic() + LIMIT_S
        while not look():
            assert may_end or self.process.poll() is None, self.said
            assert time.monotonic() < give_up_s
            time.sleep(0.02)

    def step(self) -> int:
        live = read_live(self.dir)
        return live.step if live is not None else 0

    @property
    def said(self) -> str:
        """On its stderr, by the process that was started last."""
        return (self.folder / "said").read_text()

    def ended(self) -> tuple[int, str]:
        return self.process.wait(LIMIT_S), self.said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
