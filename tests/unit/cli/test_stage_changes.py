from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.cli.stage_changes import refuse_other_unit, refuse_stage_change
from surefoot.core.errors import ConfigError
from surefoot.core.sections import DataSection, RunConfig, StageSection

OLD = (StageSection(first_sample=100, lr=1e-4),)
CURSOR = {"next_sample": 160, "unit_tokens": 256}


def config_of(*stages: StageSection) -> RunConfig:
    return RunConfig(data=DataSection(seq_len=128), stage=stages)


@pytest.mark.parametrize(
    "new",
    [
        (*OLD, StageSection(first_sample=160, lr=1e-5)),
        (*OLD, StageSection(first_sample=160, seq_len=256)),
    ],
    ids=str,
)
def test_what_has_not_begun_may_change(new: tuple[StageSection, ...]) -> None:
    refuse_stage_change(config_of(*OLD), config_of(*new), cursor=CURSOR, where="config.toml")
    refuse_stage_change(config_of(*new), config_of(*OLD), cursor=CURSOR, where="config.toml")


@pytest.mark.parametrize(
    ("new", "sample"),
    [((), 100), ((StageSection(first_sample=100, lr=2e-4),), 100), ((*OLD, StageSection(first_sample=159, lr=1e-5)), 159)],
    ids=str,
)
def test_what_has_begun_may_not(new: tuple[StageSection, ...], sample: int) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_stage_change(config_of(*OLD), config_of(*new), cursor=CURSOR, where="config.toml")
    assert f"differ from sample {sample} on, and the run goes on at sample 160" in refused.value.what
    assert "may begin at sample 160 or later" in refused.value.hint
    refuse_stage_change(config_of(*OLD), config_of(*new), cursor={}, where="config.toml")  # nothing was trained


def test_a_stage_that_the_unit_of_the_run_does_not_hold_is_refused() -> None:
    longer = (*OLD, StageSection(first_sample=900, seq_len=512))
    with pytest.raises(ConfigError) as refused:
        refuse_other_unit(config_of(*longer), cursor=CURSOR, where="config.toml")
    assert "the stage at sample 900 has seq_len = 512, and this run draws samples in units of 256" in refused.value.what
    assert "data.max_seq_len" in refused.value.hint
    kept_open = replace(config_of(*longer), data=DataSection(seq_len=128, max_seq_len=512))
    refuse_other_unit(kept_open, cursor={**CURSOR, "unit_tokens": 512}, where="config.toml")
    refuse_other_unit(kept_open, cursor={}, where="config.toml")  # nothing was trained


def test_the_unit_of_a_run_is_never_raised() -> None:
    raised = RunConfig(data=DataSection(seq_len=128, max_seq_len=1024))
    with pytest.raises(ConfigError) as refused:
        refuse_other_unit(raised, cursor=CURSOR, where="config.toml")
    assert "data.max_seq_len = 1024, and this run draws samples in units of 256" in refused.value.what
    assert "set data.max_seq_len = 256, or 0" in refused.value.hint
    refuse_other_unit(RunConfig(data=DataSection(seq_len=128, max_seq_len=128)), cursor=CURSOR, where="config.toml")
