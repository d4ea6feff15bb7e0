"""A real run with all that works beside it: what is committed is loaded by others in idle time, and nothing outlives the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from surefoot.core.records import LedgerEntry, Rung
from surefoot.observe.ledger import read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.live import LiveRecord, read_live

Answer = TypeVar("Answer")

CONFIG = """
[run]
name = "run"
dir = "run"
[data]
path = "prepared"
tokenizer = "bytes"
seq_len = 64
[[data.sources]]
name = "text"
files = ["text"]
[model]
num_layers = 2
d_model = 64
num_heads = 2
[train]
num_steps = {num_steps}
global_batch_size = 16
micro_batch_size = 4
eval_num_samples = 8
[parallel]
dp_replicate = 2
[checkpoint]
interval_steps = {interval_steps}
prove = {prove}
prove_end_s = 90.0
[observe]
status_interval_s = 0.1
[launch]
threads_per_rank = 1
"""


class Beside:
    """A run in the folder `folder`."""

    def __init__(self, folder: Path, *, num_steps: int, interval_steps: int, prove: str) -> None:
        self.folder = folder
        (folder / "text").mkdir()
        for index in range(40):
            (folder / "text" / f"{index:03d}.txt").write_text(" ".join(f"w{(index * 31 + place * 17) % 97}" for place in range(60 + index)))
        (folder / "run.toml").write_text(CONFIG.format(num_steps=num_steps, interval_steps=interval_steps, prove=prove))
        with (folder / "out").open("ab") as out:
            command = [sys.executable, "-m", "surefoot.cli.main", "train", str(folder / "run.toml")]
            environment = {**os.environ, "DRILL_FOLDER": str(folder)}  # a mark that all its processes inherit
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def entries(self, event: str) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.folder / "run" / "ledger.jsonl") if entry.event == event]

    def until(self, look: Callable[[], Answer | None], *, limit_s: float = 100.0) -> Answer:
        give_up_s = time.monotonic() + limit_s
        while time.monotonic() < give_up_s:
            answer = look()
            if answer is not None and answer is not False:
                return answer
            time.sleep(0.01)
        raise AssertionError(f"waited {limit_s:g} s in vain: {self.told()}")

    def told(self) -> str:
        logs = [self.folder / "out", *sorted((self.folder / "run").rglob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in logs if path.exists())

    def pids(self, module: str) -> list[int]:
        """Processes of this run whose module begins so, by their command lines and the mark in their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                mark = (folder / "environ").read_bytes()
                is_dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if f"-m {module}" in line and f"DRILL_FOLDER={self.folder}".encode() in mark.split(b"\0") and not is_dead:
                found.append(int(folder.name))
        return found


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Beside]]:
    begun: list[Beside] = []

    def start(*, num_steps: int, interval_steps: int, prove: str = "true") -> Beside:
        begun.append(Beside(tmp_path, num_steps=num_steps, interval_steps=interval_steps, prove=prove))
        return begun[-1]

    yield start
    for run in begun:
        run.process.kill()
        run.process.wait()


@pytest.mark.timeout(240)
def test_what_is_committed_is_loaded_by_others_in_idle_time(begin: Callable[..., Beside]) -> None:
    run = begin(num_steps=40, interval_steps=20)
    pid = run.until(lambda: next(iter(run.pids("surefoot.cli.prover")), None))
    run.until(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE)
    loader = run.until(lambda: next(iter(run.pids("surefoot.checkpoint.prove_rank")), None))
    assert os.sched_getscheduler(loader) == os.SCHED_IDLE
    assert run.process.wait(timeout=150) == 0, run.told()
    newest = fold_lineage(read_ledger(run.folder / "run" / "ledger.jsonl")).newest()
    assert newest is not None
    assert (newest.step, newest.rung) == (40, Rung.LOADABLE), run.told()
    assert {entry.by for entry in run.entries("checkpoint.loaded")} == {"prover"}
    assert run.pids("surefoot.") == []


@pytest.mark.timeout(240)
def test_a_prover_that_is_killed_is_followed_by_another(begin: Callable[..., Beside]) -> None:
    run = begin(num_steps=300, interval_steps=150)
    pid = run.until(lambda: next(iter(run.pids("surefoot.cli.prover")), None))
    loader = run.until(lambda: next(iter(run.pids("surefoot.checkpoint.prove_rank")), None))
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.entries("aide.lost") or None)
    run.until(lambda: loader not in run.pids("surefoot.checkpoint.prove_rank"))
    assert run.process.wait(timeout=200) == 0, run.told()
    assert [entry.fields["name"] for entry in run.entries("aide.lost")] == ["prover"]
    assert run.entries("checkpoint.loaded")[-1].fields["id"] == "s300-a1"
    assert len(run.entries("generation.started")) == 1


@pytest.mark.timeout(240)
def test_nothing_outlives_the_agent(begin: Callable[..., Beside]) -> None:
    run = begin(num_steps=100_000, interval_steps=20)
    run.until(lambda: run.pids("surefoot.checkpoint.prove_rank") or None)
    run.process.kill()
    run.process.wait()
    run.until(lambda: not run.pids("surefoot.") or None, limit_s=30.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victims", ["ranks", "ranks and uploader"])
def test_what_was_staged_is_committed_for_dead_ranks_and_resumed_from(begin: Callable[..., Beside], victims: str) -> None:
    """The uploader is stopped, so that only memory has the one save there is when the ranks die: the run goes on from it all the same."""
    run = begin(num_steps=60, interval_steps=20, prove="false")
    uploader = run.until(lambda: next(iter(run.pids("surefoot.cli.uploader")), None))
    run.until(lambda: run.entries("attempt.started") or None)  # it serves by now
    os.kill(uploader, signal.SIGSTOP)

    def well_past_the_save() -> LiveRecord | None:
        live = read_live(run.folder / "run")
        return live if live is not None and len(live.ranks) == 2 and all(rank.step >= 25 for rank in live.ranks) else None

    live = run.until(well_past_the_save)
    assert run.entries("checkpoint.committed") == []
    for rank in live.ranks:
        os.kill(rank.pid, signal.SIGKILL)
    os.kill(uploader, signal.SIGKILL if "uploader" in victims else signal.SIGCONT)
    assert run.process.wait(timeout=150) == 0, run.told()
    first = run.entries("checkpoint.committed")[0]
    (resumed,) = run.entries("run.resumed")
    assert (first.fields["id"], first.generation) == ("s20-a1", 1)
    assert first.seq < run.entries("generation.started")[1].seq
    assert (resumed.fields["checkpoint"], resumed.step) == ("s20-a1", 20)
    assert [entry.fields["id"] for entry in run.entries("checkpoint.committed")] == ["s20-a1", "s40-a2", "s60-a2"]
    assert len(run.entries("aide.lost")) == ("uploader" in victims)
