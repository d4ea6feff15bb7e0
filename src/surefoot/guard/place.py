"""Where this process runs: run folder, generation, beats; under our agent, under a stock launcher, or alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from surefoot.coordinate.beats import BeatBoard
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import Clock
from surefoot.core.errors import SurefootError
from surefoot.core.sections import RunConfig
from surefoot.observe.ledger import read_ledger
from surefoot.observe.lineage import fold_counters
from surefoot.tensors.world import World, agree_ok, broadcast_json


@dataclass
class Place:
    """`lock` is held here only on rank 0 and only where no agent holds it."""

    run_dir: Path
    generation: int
    under_agent: bool
    board: BeatBoard
    lock: RunLock | None


def find_place(config: RunConfig, world: World, *, clock: Clock) -> Place:
    """Collective over the save group. Rank 0 takes the lock when no agent did; all raise ConfigError when it is held."""
    beats_fd = os.environ.get("SUREFOOT_BEATS_FD")
    if beats_fd is not None:
        run_dir = Path(os.environ["SUREFOOT_RUN_DIR"])
        return Place(run_dir, int(os.environ["SUREFOOT_GENERATION"]), under_agent=True, board=BeatBoard.attach(int(beats_fd)), lock=None)
    run_dir = Path(config.run.dir or Path("runs") / config.run.name)
    lock: RunLock | None = None
    error: SurefootError | None = None
    generation = 0
    if world.leads:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = RunLock.acquire(run_dir, job=f"pid-{os.getpid()}", clock=clock, lease_s=config.launch.lease_s)
            generation = fold_counters(read_ledger(run_dir / "ledger.jsonl")).generation + 1
        except SurefootError as found:
            error = found
    if (agreed := agree_ok(world, error)) is not None:
        raise agreed
    generation = int(broadcast_json(world, generation))
    return Place(run_dir, generation, under_agent=False, board=BeatBoard.create(world.size, generation=generation), lock=lock)
