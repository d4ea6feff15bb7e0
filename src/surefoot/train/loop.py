"""The loop: whoever iterates owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from surefoot.coordinate.lock import RunLock
from surefoot.core.records import StepReport
from surefoot.core.sections import RunConfig
from surefoot.guard import Guard
from surefoot.guard.script import Script
from surefoot.tensors.process_group import connected, set_threads
from surefoot.tensors.world import lead
from surefoot.train.build import build_parts, make_deterministic
from surefoot.train.recompute import Recompute
from surefoot.train.step import Parts, train_step


@contextmanager
def open_run(
    config: RunConfig, *, on_rank_0: Callable[[], RunLock] | None = None, script: Script | None = None
) -> Iterator[tuple[Parts, Guard]]:
    """Collective over the world. Everything built and guarded, nothing restored yet; closed on the way out.

    `on_rank_0` runs on rank 0 before anything is built, and hands the run's lock over to the guard; all ranks raise what it raised. With a
    `script` the run repeats another one, whose decisions it takes over.
    """
    set_threads(config.launch)
    make_deterministic(config.numerics)
    with connected(config.launch) as world:
        lock = lead(world, on_rank_0) if on_rank_0 else None
        parts = build_parts(config, world)
        with Guard(
            config,
            model=parts.cut.module,
            optimizer=parts.optimizer,
            data=parts.data,
            evaluation=parts.evaluation if script is None else None,
            numerics=parts.cut.exact_sums,
            gauges=parts.cut.gauges,
            scaler=parts.scaler,
            world=world,
            lock=lock,
            can_redo=True,
            recompute=Recompute(parts, last_step=lambda: guard.step - 1),
            script=script,
        ) as guard:
            yield parts, guard


def training_steps(config: RunConfig) -> Iterator[StepReport]:
    """Collective over the world. Restore or start, then one report a step until the run is finished or has to leave.

    Ends normally when `train.num_steps` are done. Raises SystemExit with the exit code (docs/index.md) when the group agreed to leave.
    """
    with open_run(config) as (parts, guard):
        guard.restore()
        while guard.begin():
            yield train_step(parts, guard)
