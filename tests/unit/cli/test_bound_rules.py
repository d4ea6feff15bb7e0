from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.cli.main import run


@pytest.mark.parametrize("rules", ['{ outlier_los = "alert" }', '{ outlier_loss = "shout" }', '{ nonfinite = "off" }'])
@pytest.mark.parametrize("verb", [["train"], ["config", "show"]])
def test_rules_that_do_not_exist_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rules: str, verb: list[str]
) -> None:
    (tmp_path / "run.toml").write_text(f'[run]\nname = "a"\n[heal]\nrules = {rules}\n')
    assert run([*verb, str(tmp_path / "run.toml")]) == 2
    assert "[heal] rules" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
