"""What is refused before a process is started or a line is ledgered."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.cli.resume_from import named_here, wish_for
from surefoot.core.errors import ConfigError
from surefoot.core.records import CheckpointRef
from surefoot.core.sections import RunConfig
from surefoot.observe.lineage import Lineage


@pytest.mark.parametrize(
    "url",
    [
        "s3://me:hunter2@bucket/prefix/s500-a1",
        "https://me:hunter2@host/bucket",
        "s3://bucket/s500-a1?X-Amz-Credential=hunter2",
    ],
)
def test_a_url_with_credentials_is_refused_and_they_are_not_repeated(tmp_path: Path, url: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        wish_for(url, config=RunConfig(), run_dir=tmp_path, entries=(), accepted=(), confirmed=False, reason="")
    assert refused.value.hint
    assert "hunter2" not in str(refused.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize(("num_refs", "told"), [(8, "there are s1-a1, "), (11, "s11-a1 and 3 before them: `surefoot checkpoint list ")])
def test_the_newest_that_are_there_are_named_and_the_others_counted(tmp_path: Path, num_refs: int, told: str) -> None:
    refs = tuple(CheckpointRef(f"s{step}-a1", step, 1, None, "", 0) for step in range(1, num_refs + 1))
    for ref in refs:
        (tmp_path / "checkpoints" / ref.id).mkdir(parents=True)
        (tmp_path / "checkpoints" / ref.id / "manifest.json").touch()
    with pytest.raises(ConfigError) as refused:
        named_here("99", Lineage(refs=refs), tmp_path)
    assert told in refused.value.hint
    assert ("before them" in refused.value.hint) == (num_refs > 8)
