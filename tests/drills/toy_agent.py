"""The agent of a drill in a process of its own, as `surefoot train` runs it: lock, ledger, agent, exit code. argv: RUN_DIR, JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import SystemClock
from surefoot.core.errors import SurefootError
from surefoot.core.sections import CheckpointSection, LaunchSection, ObserveSection, RunConfig
from surefoot.launch.agent import Agent
from surefoot.launch.aide import AideSpec
from surefoot.launch.director import LocalDirector
from surefoot.launch.logs import logging_aside
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import fold_counters


def main() -> int:
    run_dir, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    clock = SystemClock()
    launch = replace(LaunchSection(restart_wait_s=0.0), **options["launch"])
    ledger = Ledger(run_dir / "ledger.jsonl", clock=clock, by="agent")
    lock = RunLock.acquire(run_dir, job="drill", clock=clock, lease_s=launch.lease_s)
    try:
        agent = Agent(
            RunConfig(
                launch=launch,
                observe=ObserveSection(status_interval_s=0.1, **options["observe"]),
                checkpoint=CheckpointSection(**options["checkpoint"]),
            ),
            run_dir=run_dir,
            director=LocalDirector(launch, num_ranks=options["num_ranks"], counters=fold_counters(read_ledger(ledger.path))),
            entry=options["entry"],
            warm=options["warm"],
            ledger=ledger,
            lock=lock,
            clock=clock,
            console=lambda line: _write(f"{line}\n".encode()),
            aides=[_aide(run_dir, **aide) for aide in options["aides"]],
        )
        with logging_aside():
            return agent.run()
    except SurefootError as error:
        (run_dir / "agent.error.json").write_text(json.dumps(error.as_json()))
        return error.exit_code
    finally:
        lock.release()


def _aide(run_dir: Path, *, behaviour: str = "", program: str = "", name: str = "toy", end_limit_s: float = 20.0, **facts: Any) -> AideSpec:
    """`program`: a module of the product in place of the toy with a `behaviour`."""
    which = ("-m", program) if program else (str(Path(__file__).with_name("toy_aide.py")), behaviour)
    return AideSpec(name, (sys.executable, *which, "--run-dir", str(run_dir)), end_limit_s=end_limit_s, **facts)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
