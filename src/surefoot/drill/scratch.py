"""A small real run in a folder of its own: its text, its config, its process, and what can be seen of it from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from surefoot.core.errors import SurefootError
from surefoot.core.records import LedgerEntry, Phase
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.live import LiveRecord, read_live

T = TypeVar("T")

NUM_STEPS = 150
_LOOK_S = 0.02
_CONFIG = """\
[run]
name = "drill"
dir = "run"
seed = {seed}
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
num_steps = {num_steps}
global_batch_size = {global_batch_size}
micro_batch_size = 2
eval_interval_steps = 0
eval_num_samples = 2
[schedule]
kind = "constant"
warmup_steps = 1
[parallel]
dp_replicate = {num_ranks}
[monitor]
audit_interval_steps = 0
[canary]
interval_steps = 0
[checkpoint]
interval_steps = 20
"""

_SETTINGS = (
    *("observe.status_interval_s=0.1", "launch.threads_per_rank=1", "checkpoint.prove=false"),
    *("launch.limits=fixed", "launch.step_limit_s=3.0", "launch.data_limit_s=3.0", "launch.first_step_limit_s=30.0"),
)
"""What is promised about a hang is its limit and two seconds, whatever the limit: a short one makes a short drill."""

QUIET = (
    *('checkpoint.tiers=["memory","disk"]', "checkpoint.prove=false", "observe.status_interval_s=0.1", "data.look_ahead_samples=0"),
    *('alerts.webhook=""', 'alerts.slack=""', "alerts.email=[]", 'alerts.command=""', "drill.fault=none"),
)
"""For somebody else's config, run only to see: nobody is paged, nothing goes to its stores."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where drills of one config run: `config` is started as it is, each run in a folder of its own under `folder`."""

    folder: Path
    config: Path
    settings: tuple[str, ...]

    @classmethod
    def make(cls, folder: Path, *, num_ranks: int, seed: int) -> Scratch:
        """Text, and a config that trains on it for some seconds on CPU ranks."""
        texts = folder / "text"
        texts.mkdir(parents=True)
        for index in range(40):
            (texts / f"{index:02d}.txt").write_text(
                f"document {index}: " + f"line {index * 7 % 40} of a text that nobody reads twice. " * 8
            )
        config = folder / "run.toml"
        config.write_text(_CONFIG.format(seed=seed, num_steps=NUM_STEPS, num_ranks=num_ranks, global_batch_size=4 * num_ranks))
        return cls(folder, config, _SETTINGS)

    def start(self, name: str, *settings: str) -> DrillRun:
        return DrillRun(self, name, settings=settings)


class DrillRun:
    """One run under its agent, a process of the public command line. `end` it whatever happens."""

    def __init__(self, scratch: Scratch, name: str, *, settings: Sequence[str] = ()) -> None:
        self.dir = scratch.folder / name
        self._said = scratch.folder / f"{name}.said"
        wanted = (f"run.dir={self.dir}", *scratch.settings, *settings)
        self._command = [sys.executable, "-m", "surefoot.cli.main", "train", str(scratch.config), *wanted]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._said.open("ab") as said:
            return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=_environment())

    def start_again(self) -> None:
        """The same command once more, after the run has left."""
        self.process = self._start()

    def entries(self) -> list[LedgerEntry]:
        path = self.dir / LEDGER_NAME
        return read_ledger(path) if path.exists() else []

    def live(self) -> LiveRecord | None:
        return read_live(self.dir)

    def until(self, look: Callable[[], T | None], *, what: str, limit_s: float) -> T:
        """The first answer of `look` that is not None. Raises SurefootError when the run ends or the time is over before."""
        give_up_s = time.monotonic() + limit_s
        while (answer := look()) is None:
            if self.process.poll() is not None:
                raise SurefootError(f"the run ended with {self.process.returncode} before {what}", where=str(self.dir), hint=self.words())
            if time.monotonic() >= give_up_s:
                raise SurefootError(f"not {what} within {limit_s:g} s", where=str(self.dir), hint=self.words())
            time.sleep(_LOOK_S)
        return answer

    def stepping(self, *, step: int, num_ranks: int, limit_s: float) -> LiveRecord:
        """Wait until every rank has finished `step` steps and is at the next ones."""

        def look() -> LiveRecord | None:
            live = self.live()
            if live is None or len(live.ranks) < num_ranks:
                return None
            return live if all(rank.step >= step and rank.phase == Phase.STEP.label for rank in live.ranks) else None

        return self.until(look, what=f"every rank was at step {step}", limit_s=limit_s)

    def wait(self, *, limit_s: float) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise SurefootError(f"the run did not end within {limit_s:g} s", where=str(self.dir), hint=self.words()) from None

    def words(self) -> str:
        """The last line that it said."""
        lines = self._said.read_text(errors="replace").splitlines() if self._said.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def end(self) -> None:
        """Nothing of it is left when this returns: the kernel ends the ranks with their agent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def _environment() -> dict[str, str]:
    """Ours, without what a launcher around this process would tell the run about itself."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in foreign and not name.startswith("SUREFOOT_")}
