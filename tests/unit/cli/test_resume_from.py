"""What is refused before a process is started or a line is ledgered."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.cli.resume_from import wish_for
from surefoot.core.errors import ConfigError
from surefoot.core.sections import RunConfig


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
