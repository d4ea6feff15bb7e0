"""Where this process runs: run folder, generation, beats; under our agent, under a stock launcher, or alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from surefoot.coordinate.beats import BeatBoard
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import Clock
from surefoot.core.config_text import config_text
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.identity import section_hashes
from surefoot.core.sections import RunConfig
from surefoot.observe.lineage import fold_counters
from surefoot.observe.opening import note_take_over, open_ledger
from surefoot.observe.run_dir import CONFIG_NAME
from surefoot.tensors.world import World, broadcast_json, lead


@dataclass(frozen=True)
class Place:
    """`lock` is held here only on rank 0 and only where no agent holds it."""

    run_dir: Path
    generation: int
    under_agent: bool
    board: BeatBoard
    lock: RunLock | None


_BEATS_FD = "SUREFOOT_BEATS_FD"


def under_agent() -> bool:
    return _BEATS_FD in os.environ


def find_place(config: RunConfig, world: World, *, clock: Clock, lock: RunLock | None) -> Place:
    """Collective over the save group. Where no agent opened the run, rank 0 does, under `lock` or one that it takes.

    All ranks raise ConfigError when somebody else holds the run, Corrupt when its ledger is not what was written.
    """
    if under_agent():
        beats_fd = os.environ[_BEATS_FD]
        run_dir = Path(os.environ["SUREFOOT_RUN_DIR"])
        return Place(run_dir, int(os.environ["SUREFOOT_GENERATION"]), under_agent=True, board=BeatBoard.attach(int(beats_fd)), lock=None)
    run_dir = Path(config.run.dir or Path("runs") / config.run.name)
    opened = lead(world, lambda: _open_run(config, run_dir, clock=clock, lock=lock))
    held, generation = opened or (None, 0)
    generation = int(broadcast_json(world, generation))
    board = BeatBoard.create(world.size, generation=generation)  # private to this process: nobody watches it
    return Place(run_dir, generation, under_agent=False, board=board, lock=held)


def _open_run(config: RunConfig, run_dir: Path, *, clock: Clock, lock: RunLock | None) -> tuple[RunLock, int]:
    """The held lock and the number of the generation that begins. Writes `config.toml` where nobody has."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run folder cannot be made: {error.strerror}", where=str(run_dir), hint="choose another [run] dir"
        ) from error
    held = lock or RunLock.acquire(run_dir, job=f"pid-{os.getpid()}", clock=clock, lease_s=config.launch.lease_s)
    try:
        ledger, entries = open_ledger(run_dir, clock=clock, by="rank 0")
        counters = fold_counters(entries)
        if held.taken_over is not None and lock is None:
            note_take_over(ledger, entries, reason=held.taken_over.reason, former=held.taken_over.former)
        if not (run_dir / CONFIG_NAME).exists():
            write_atomic(run_dir / CONFIG_NAME, config_text(config, folder=run_dir, run_dir="."))
        if not any(entry.event == Event.RUN_CREATED for entry in entries):
            ledger.append(
                Event.RUN_CREATED,
                generation=counters.generation,
                attempt=counters.attempt,
                step=counters.step,
                fields={"config_hashes": section_hashes(config)},
            )
        return held, counters.generation + 1
    except BaseException:
        held.release()
        raise
