"""From manifest, config, cursor and blocklist to the order of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.core.blocking import Block
from surefoot.core.errors import ConfigError
from surefoot.core.sections import DataSection, RunConfig, TrainSection
from surefoot.core.stages import Stage, stages_of
from surefoot.data.blocked import skipped_ranges
from surefoot.data.cursor import cursor_from_json
from surefoot.data.manifest import Manifest
from surefoot.data.run_order import RunOrder, Sample
from surefoot.data.segments import Recipe, Restart
from surefoot.data.steps import StepPlan

__all__ = ["RunOrder", "Sample", "order_over", "run_order", "step_plan", "unit_of"]


def unit_of(stages: Sequence[Stage], *, max_seq_len: int, begun_with: int = 0) -> int:
    """The unit that samples are drawn in: the longest sequence that is declared, or that the run has `begun_with`.

    Raises ConfigError for a length that does not divide it, and for one that is longer than a run has begun with.
    """
    longest = max(max_seq_len, *(stage.seq_len for stage in stages))
    if begun_with and longest > begun_with:
        raise ConfigError(
            f"a sequence length of {longest}, and this run draws its samples in units of {begun_with}",
            where="[[stage]] seq_len",
            hint="a run that will need longer ones says so before it begins, by [data] max_seq_len",
            got=longest,
            wanted=begun_with,
        )
    unit = begun_with or longest
    for stage in stages:
        if unit % stage.seq_len:
            what = f"seq_len = {stage.seq_len} does not divide {unit}, the unit that samples are drawn in"
            raise ConfigError(what, where="[[stage]] seq_len", hint="use a divisor, so that nothing is left over", got=stage.seq_len)
    return unit


def order_over(
    manifest: Manifest,
    *,
    stages: Sequence[Stage],
    data: DataSection,
    train: TrainSection,
    seed: int,
    blocks: Sequence[Block] = (),
    restarts: Mapping[str, Restart] | None = None,
    begun_with: int = 0,
    begun_weights: Mapping[str, int] | None = None,
) -> RunOrder:
    """The order of a run over prepared data. Raises DataError and ConfigError where they do not go together."""
    recipe = Recipe(
        seed=seed,
        stages=tuple(stages),
        policies={source.name: source for source in data.sources},
        unit_tokens=unit_of(stages, max_seq_len=data.max_seq_len, begun_with=begun_with),
        reserve_fraction=data.reserve_fraction,
        restarts=restarts or {},
        begun_weights=begun_weights or {},
    )
    tokens = {name: entry.splits["train"].tokens for name, entry in manifest.sources.items()}
    return RunOrder(recipe, tokens=tokens, steps=step_plan(stages, train=train, blocks=blocks), blocks=blocks)


def step_plan(stages: Sequence[Stage], *, train: TrainSection, blocks: Sequence[Block] = ()) -> StepPlan:
    """A step ends at a stage with another shape or another base of the rotary embeddings: one forward has one of each."""
    shapes = [(stage.seq_len, stage.rope_base) for stage in stages]
    return StepPlan(
        train.batch_ramp,
        global_batch_size=train.global_batch_size,
        later=[(stage.first_sample, stage.global_batch_size) for stage in stages if stage.global_batch_size],
        edges=[stage.first_sample for stage, shape, before in zip(stages[1:], shapes[1:], shapes, strict=False) if shape != before],
        skipped=skipped_ranges(blocks),
    )


def run_order(
    manifest: Manifest, config: RunConfig, *, cursor: Mapping[str, object] | None = None, blocks: Sequence[Block] = ()
) -> RunOrder:
    """The order of the run that `config` describes, as `cursor` says that it has begun."""
    begun = cursor_from_json(cursor) if cursor else None
    return order_over(
        manifest,
        stages=stages_of(config),
        data=config.data,
        train=config.train,
        seed=config.run.seed,
        blocks=blocks,
        restarts=begun.restarts if begun else None,
        begun_with=begun.unit_tokens if begun else 0,
        begun_weights=begun.begun_weights if begun else None,
    )
