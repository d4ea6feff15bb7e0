"""Short real runs with and without a fault: what every rank does, and the config they do it by."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import parse_id
from surefoot.core.errors import SurefootError
from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    LaunchSection,
    ModelSection,
    MonitorSection,
    OptimizerSection,
    ParallelSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TrainSection,
)
from surefoot.train.loop import open_run
from surefoot.train.step import train_step
from tests.ranks.injections.corpus import sources
from tests.ranks.injections.faults import Fault, Injection, config_of_rank, lose_moments

NUM_RANKS: Final = 3
SEQ_LEN: Final = 128
NUM_STEPS: Final = 200
NUM_SHORT_STEPS: Final = 80
SAVE_STEPS: Final = 20


def config_of(
    data: Path,
    run_dir: Path,
    *,
    sharded: bool = False,
    seed: int = 0,
    num_steps: int = NUM_STEPS,
    poison: tuple[str, int] | None = None,
    **parts: Any,
) -> RunConfig:
    """Six samples a step, two for each of three ranks; whole copies, or one that the ranks share. `poison` as in `sources`."""
    config = RunConfig(
        run=RunSection(name="injected", dir=str(run_dir), seed=seed),
        data=DataSection(path=str(data), seq_len=SEQ_LEN, sources=sources(poison)),
        model=ModelSection(num_layers=2, d_model=32, num_heads=2),
        train=TrainSection(
            num_steps=num_steps, global_batch_size=6, micro_batch_size=2, eval_interval_steps=SAVE_STEPS, eval_num_samples=48
        ),
        optimizer=OptimizerSection(lr=1e-2),
        schedule=ScheduleSection(kind="constant", warmup_steps=20),
        parallel=ParallelSection(dp_shard=NUM_RANKS) if sharded else ParallelSection(dp_replicate=NUM_RANKS),
        checkpoint=CheckpointSection(interval_steps=SAVE_STEPS, keep_last=6, prove=False, tiers=("disk",)),
        monitor=MonitorSection(audit_interval_steps=SAVE_STEPS, probe_interval_steps=0, log_interval_steps=1000),
        launch=LaunchSection(threads_per_rank=1),
    )
    return replace(config, **parts)


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended on a rank: what its process would have ended with, and what was said."""

    exit_code: int
    error: str = ""


def injected(*, rank: int, world_size: int, config: RunConfig, faults: tuple[Fault, ...] = (), crash_at: int = 0, saved: int = 0) -> End:
    """Collective over the world. A run to its end or until it leaves, with its faults.

    `crash_at` kills every rank after that step, once the checkpoint of step `saved` is on disk.
    """
    for fault in faults:
        config = config_of_rank(config, fault, rank=rank)
    try:
        with open_run(config) as (parts, guard):
            resumed = guard.restore()
            if resumed.checkpoint and any(fault.kind == "lost-moments" for fault in faults):
                lose_moments(parts.optimizer)
            injections = [Injection(fault, parts, guard) for fault in faults]
            while guard.begin():
                here = parts
                for injection in injections:
                    here = injection.before_step(here)
                train_step(here, guard)
                if guard.step == crash_at:
                    _await_published(Path(config.run.dir) / "checkpoints", step=saved)
                    os.kill(os.getpid(), signal.SIGKILL)
    except SystemExit as left:
        return End(int(str(left.code)))
    except SurefootError as error:
        return End(error.exit_code, str(error))
    return End(0)


def each_alone(*, rank: int, world_size: int, configs: Sequence[RunConfig]) -> End:
    """Local. As many runs as ranks, at the same time: each on its own rank alone."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return injected(rank=0, world_size=1, config=configs[rank])


def _await_published(root: Path, *, step: int) -> None:
    """A save goes on beside the loop: a crash before its end would lose it."""
    deadline_s = time.monotonic() + 30.0
    while not any(parsed and parsed[0] == step for parsed in map(parse_id, published(root))):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
