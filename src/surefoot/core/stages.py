"""The stages of a run, filled in: what holds from which sample on. Pure; the same on every rank, and after any number of resumes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

from surefoot.core.errors import ConfigError
from surefoot.core.sections import DataSection, ModelSection, OptimizerSection, StageSection


class HasStages(Protocol):
    """What of a RunConfig is read here."""

    @property
    def model(self) -> ModelSection: ...
    @property
    def data(self) -> DataSection: ...
    @property
    def optimizer(self) -> OptimizerSection: ...
    @property
    def stage(self) -> tuple[StageSection, ...]: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """From `first_sample` on. `weights` are by source, as they were given; empty where the config names no source (then each gives in
    proportion to what it holds).

    `global_batch_size` is 0 while [train] decides.
    """

    first_sample: int
    weights: tuple[tuple[str, float], ...]
    seq_len: int
    rope_base: float
    lr: float
    global_batch_size: int = 0


def stages_of(config: HasStages) -> tuple[Stage, ...]:
    """All stages in their order, the first at sample 0: what a `[[stage]]` leaves out stays as it was before it."""
    stages = [
        Stage(
            first_sample=0,
            weights=tuple((source.name, source.weight) for source in config.data.sources),
            seq_len=config.data.seq_len,
            rope_base=config.model.rope_base,
            lr=config.optimizer.lr,
        )
    ]
    for section in in_order(config.stage):
        before = stages[-1]
        stage = Stage(
            first_sample=section.first_sample,
            weights=section.weights or before.weights,
            seq_len=section.seq_len or before.seq_len,
            rope_base=section.rope_base or before.rope_base,
            lr=section.lr or before.lr,
            global_batch_size=section.global_batch_size or before.global_batch_size,
        )
        if stage.first_sample == before.first_sample:
            stages.pop()
        stages.append(stage)
    return tuple(stages)


def refuse_stages(config: HasStages, *, where: str) -> None:
    """Raises ConfigError: for what reckons with one length, one mixture and one rate throughout, and would be wrong of this run."""
    if config.stage:
        hint = "`stage=[]` after the TOML leaves them out; of a run with stages, ask a run like it without"
        raise ConfigError(f"it has {len(config.stage)} [[stage]], and stages are not planned", where=where, hint=hint)


def refuse_other_shapes(config: HasStages, *, where: str) -> None:
    """The same for what reckons with one length and one batch only."""
    if len({(stage.seq_len, stage.global_batch_size) for stage in stages_of(config)}) > 1:
        refuse_stages(config, where=where)


def in_order(sections: Sequence[StageSection]) -> list[StageSection]:
    """By the sample at which they begin."""
    return sorted(sections, key=lambda section: section.first_sample)


def longest_seq_len(config: HasStages) -> int:
    """The unit that samples are drawn in: `data.max_seq_len`, or the longest sequence that the config asks for anywhere."""
    return config.data.max_seq_len or max(config.data.seq_len, *(section.seq_len for section in config.stage), 0)


def first_change(old: Sequence[StageSection], new: Sequence[StageSection]) -> int | None:
    """The first global sample that two lists of stages treat differently; None where they say the same."""
    for was, now in zip_longest(in_order(old), in_order(new)):
        if was is None or now is None or _told(was) != _told(now):
            return min(section.first_sample for section in (was, now) if section is not None)
    return None


def _told(section: StageSection) -> StageSection:
    return replace(section, weights=tuple(sorted(section.weights)))


def stage_at(config: HasStages, sample: int) -> Stage:
    """The stage that global `sample` lies in."""
    stages = stages_of(config)
    return stages[stage_index(stages, sample)]


def stage_before(config: HasStages, next_sample: int) -> Stage:
    """The stage that weights were last trained in when `next_sample` is the first sample they have not seen; the first one before any."""
    return stage_at(config, max(0, next_sample - 1))


def stage_index(stages: Sequence[Stage], sample: int) -> int:
    """Which stage global `sample` lies in."""
    return bisect_right([stage.first_sample for stage in stages], sample) - 1
