from __future__ import annotations

import pytest

from surefoot.cli.stage_changes import refuse_past_stages
from surefoot.core.errors import ConfigError
from surefoot.core.sections import StageSection

OLD = (StageSection(first_sample=100, lr=1e-4),)


@pytest.mark.parametrize("new", [(), (*OLD, StageSection(first_sample=160, lr=1e-5)), (StageSection(first_sample=170, lr=1e-4),)], ids=str)
def test_what_has_not_begun_may_change(new: tuple[StageSection, ...]) -> None:
    refuse_past_stages(OLD, new, next_sample=100, where="config.toml")


@pytest.mark.parametrize(
    ("new", "sample"),
    [((), 100), ((StageSection(first_sample=100, lr=2e-4),), 100), ((*OLD, StageSection(first_sample=159, lr=1e-5)), 159)],
    ids=str,
)
def test_what_has_begun_may_not(new: tuple[StageSection, ...], sample: int) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_past_stages(OLD, new, next_sample=160, where="config.toml")
    assert f"differ from sample {sample} on, and the run goes on at sample 160" in refused.value.what
    assert "may begin at sample 160 or later" in refused.value.hint
