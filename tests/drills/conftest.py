"""Drills of the agent: `start_agent(...)` runs it in a process of its own on a toy job, and looks at it from outside only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest

from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import read_ledger
from surefoot.observe.live import LiveRecord, read_live
from tests.drills.s3_server import faults, s3, s3_port

Answer = TypeVar("Answer")

__all__ = ["faults", "s3", "s3_port"]  # fixtures that live elsewhere

_HERE = Path(__file__).parent
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # agents inherit it: under nohup they would ignore what is sent to them
_LIMIT_S = 40.0  # against a hang: everything here takes well below a second on a quiet machine


class AgentUnderDrill:
    """One agent process and its run folder."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self.run_dir = run_dir
        self.process = process

    def until(self, look: Callable[[], Answer | None], *, limit_s: float = _LIMIT_S) -> Answer:
        """The first answer of `look` that is not None (or False)."""
        give_up_s = time.monotonic() + limit_s
        while time.monotonic() < give_up_s:
            answer = look()
            if answer is not None and answer is not False:
                return answer
            time.sleep(0.01)
        raise AssertionError(f"waited {limit_s:g} s in vain; {self.told()}")

    def wait(self, *, limit_s: float = _LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent did not end; {self.told()}") from None

    def stepping(self, *, generation: int = 1, step: int = 1) -> LiveRecord:
        """Wait until every rank of a generation has finished some steps."""

        def look() -> LiveRecord | None:
            live = read_live(self.run_dir)
            if live is None or live.generation != generation or len(live.ranks) < 2:
                return None
            return live if all(rank.phase == "step" and rank.step >= step for rank in live.ranks) else None

        return self.until(look)

    def entries(self, event: str | None = None) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.run_dir / "ledger.jsonl") if event is None or entry.event == event]

    def error(self) -> dict[str, str]:
        error: dict[str, str] = json.loads((self.run_dir / "agent.error.json").read_text())["error"]
        return error

    def told(self) -> str:
        files = [path for path in sorted(self.run_dir.rglob("*")) if path.is_file() and path.suffix in (".log", ".err", ".json", ".jsonl")]
        return "\n".join(f"--- {path.relative_to(self.run_dir)}\n{path.read_text(errors='replace')[-1500:]}" for path in files)


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Callable[..., AgentUnderDrill]]:
    """start_agent(num_steps=60, step_s=0.01, warm_s=0, faults={...}, launch={...}, observe={...}, checkpoint={...},
    aides=[{...}], num_ranks=2, entry=..., warm=..., stdout=..., stderr=...)."""
    started: list[AgentUnderDrill] = []

    def start(
        *,
        launch: dict[str, Any] | None = None,
        observe: dict[str, Any] | None = None,
        checkpoint: dict[str, Any] | None = None,
        aides: tuple[dict[str, Any], ...] = (),
        num_ranks: int = 2,
        entry: str = "toy_rank:main",
        warm: tuple[str, ...] = ("toy_warm",),
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        **toy: Any,
    ) -> AgentUnderDrill:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        options = {"launch": launch or {}, "observe": observe or {}, "num_ranks": num_ranks, "entry": entry, "warm": warm}
        options |= {"checkpoint": checkpoint or {}, "aides": aides}
        toy = {"num_steps": 60, "step_s": 0.01, **toy}
        python_path = os.pathsep.join(filter(None, (str(_HERE), os.environ.get("PYTHONPATH", ""))))
        with (run_dir / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(_HERE / "toy_agent.py"), str(run_dir), json.dumps(options)],
                env={**os.environ, "TOY": json.dumps(toy), "PYTHONPATH": python_path},
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log if stderr is None else stderr,
                process_group=0,
            )
        started.append(AgentUnderDrill(run_dir, process))
        return started[-1]

    yield start
    for agent in started:
        agent.process.send_signal(signal.SIGKILL)
        agent.process.wait()


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """Whether a process exists and is no zombie."""

    def look(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return look
