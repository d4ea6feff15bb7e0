from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.sections import DataSection, ModelSection, OptimizerSection, RunConfig, SourceSection, StageSection
from surefoot.core.stages import (
    Stage,
    first_change,
    longest_seq_len,
    refuse_other_shapes,
    refuse_stages,
    stage_at,
    stage_before,
    stages_of,
)

CONFIG = RunConfig(
    model=ModelSection(rope_base=1e4),
    data=DataSection(seq_len=64, sources=(SourceSection("web", weight=3.0), SourceSection("code", weight=1.0))),
    optimizer=OptimizerSection(lr=1e-3),
    stage=(
        StageSection(first_sample=100, weights=(("code", 1.0),), lr=5e-4),
        StageSection(first_sample=203, seq_len=256, rope_base=5e5, global_batch_size=4),
    ),
)


def test_what_a_stage_leaves_out_stays_as_it_was() -> None:
    first, second, third = stages_of(CONFIG)
    assert first == Stage(0, (("web", 3.0), ("code", 1.0)), 64, 1e4, 1e-3)
    assert second == Stage(100, (("code", 1.0),), 64, 1e4, 5e-4)
    assert third == Stage(203, (("code", 1.0),), 256, 5e5, 5e-4, 4)


@pytest.mark.parametrize(("sample", "seq_len", "lr"), [(0, 64, 1e-3), (99, 64, 1e-3), (100, 64, 5e-4), (202, 64, 5e-4), (203, 256, 5e-4)])
def test_a_sample_lies_in_the_stage_that_began_last(sample: int, seq_len: int, lr: float) -> None:
    stage = stage_at(CONFIG, sample)
    assert (stage.seq_len, stage.lr) == (seq_len, lr)


def test_weights_belong_to_the_stage_of_the_last_sample_that_they_saw() -> None:
    assert [stage_before(CONFIG, sample).first_sample for sample in (0, 1, 100, 101, 203, 204)] == [0, 0, 0, 100, 100, 203]


def test_a_stage_at_sample_0_takes_the_place_of_the_sections() -> None:
    (only,) = stages_of(replace(CONFIG, stage=(StageSection(lr=0.5),)))
    assert (only.first_sample, only.lr, only.seq_len) == (0, 0.5, 64)


def test_the_unit_is_the_longest_declared_sequence_or_what_is_kept_open() -> None:
    assert longest_seq_len(RunConfig()) == 256
    assert longest_seq_len(CONFIG) == 256
    assert longest_seq_len(replace(CONFIG, data=replace(CONFIG.data, max_seq_len=1024))) == 1024


def test_what_reckons_with_one_recipe_refuses_stages_and_what_reckons_with_one_shape_only_those_that_change_it() -> None:
    refuse_stages(RunConfig(), where="run.toml")
    with pytest.raises(ConfigError, match="2 \\[\\[stage\\]\\], and stages are not planned"):
        refuse_stages(CONFIG, where="run.toml")
    refuse_other_shapes(replace(CONFIG, stage=CONFIG.stage[:1]), where="run.toml")
    with pytest.raises(ConfigError, match="stages are not planned"):
        refuse_other_shapes(CONFIG, where="run.toml")


STAGES = CONFIG.stage
CHANGES = [
    (STAGES, None),
    (STAGES[::-1], None),
    ((replace(STAGES[0], weights=(("code", 1.0),)), STAGES[1]), None),
    (STAGES[:1], 203),
    ((), 100),
    ((*STAGES, StageSection(first_sample=900)), 900),
    ((STAGES[0], replace(STAGES[1], first_sample=150)), 150),
    ((STAGES[0], replace(STAGES[1], first_sample=300)), 203),
    ((STAGES[0], replace(STAGES[1], lr=1.0)), 203),
    ((replace(STAGES[0], weights=(("web", 1.0),)), STAGES[1]), 100),
    ((StageSection(first_sample=50), *STAGES), 50),
]


@pytest.mark.parametrize(("changed", "sample"), CHANGES, ids=str)
def test_the_first_sample_that_two_lists_treat_differently(changed: tuple[StageSection, ...], sample: int | None) -> None:
    assert first_change(STAGES, changed) == sample
    assert first_change(changed, STAGES) == sample


def test_the_order_of_names_in_a_table_means_nothing() -> None:
    both = (StageSection(weights=(("a", 1.0), ("b", 2.0))),)
    assert first_change(both, (StageSection(weights=(("b", 2.0), ("a", 1.0))),)) is None
    assert first_change(both, (StageSection(weights=(("a", 2.0), ("b", 1.0))),)) == 0
