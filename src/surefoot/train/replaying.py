"""The ranks' part of a replay: the steps of another run once more, by its decisions, with whatever is to be looked at on the way."""

from __future__ import annotations

from dataclasses import replace

from surefoot.core.errors import ConfigError
from surefoot.core.sections import RunConfig
from surefoot.guard.script import ReplayTask
from surefoot.train.hooks import Watch, WatchedRunner, name_nonfinite, watch_logits
from surefoot.train.loop import open_run
from surefoot.train.step import Parts, train_step


def replay(config: RunConfig, task: ReplayTask) -> tuple[Parts, Watch]:
    """Collective over the world. The steps up to `task.last_step`, into the metrics of the folder that `config` names; what was seen.

    Parts are for the caller to keep as long as the process lives: what reduces gradients must not be freed before.
    """
    with open_run(config, script=task.script) as (parts, guard):
        watch = Watch(parts.world.rank, parts.cut.place.coordinates["tp"])
        watched = _watched(parts, watch, task)
        guard.restore()
        while guard.step < task.last_step and guard.begin():
            step = guard.step + 1
            watch.step = step if step >= task.first_step else None
            if parts.data.rotation != task.script.rotation(step):
                parts.data.rotation = task.script.rotation(step)
            watch.samples = parts.data.course.order.steps.samples(parts.data.next_sample).tolist()
            train_step(watched, guard)
    return parts, watch


def _watched(parts: Parts, watch: Watch, task: ReplayTask) -> Parts:
    """Local. `parts` with hooks, where something is to be looked at; else as they are."""
    module = parts.cut.module
    if task.logits and not watch_logits(module, watch) and parts.cut.place.sizes["pp"] == 1:
        raise ConfigError(
            "the model has no attention of ours whose logits could be taken",
            where="--logits",
            hint="a [model] factory that uses CoreAttention",
        )
    if not (task.logits or task.name_nonfinite):
        return parts
    after = name_nonfinite(module, watch) if task.name_nonfinite else _nothing
    return replace(parts, cut=replace(parts.cut, runner=WatchedRunner(parts.cut.runner, watch, after)))


def _nothing() -> None:
    """In place of a look at gradients."""
