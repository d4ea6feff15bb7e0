"""Who works beside a run is a matter of its config."""

from __future__ import annotations

from pathlib import Path

from surefoot.cli.aides import aides_of
from surefoot.core.sections import AlertsSection, CheckpointSection, DataSection, LaunchSection


def test_the_look_ahead_is_there_when_it_is_asked_for_and_the_run_has_begun(tmp_path: Path) -> None:
    asked = DataSection(path="data", look_ahead_samples=100)
    for data in (DataSection(path="data"), DataSection(look_ahead_samples=100)):
        assert "look-ahead" not in {
            aide.name for aide in aides_of(CheckpointSection(), tmp_path, data=data, alerts=AlertsSection(), launch=LaunchSection())
        }
    (aide,) = (
        aide
        for aide in aides_of(CheckpointSection(), tmp_path, data=asked, alerts=AlertsSection(), launch=LaunchSection())
        if aide.name == "look-ahead"
    )
    assert not aide.wanted()
    (tmp_path / "metrics").mkdir()
    assert aide.wanted()
    assert aide.end_limit_s == 0.0  # nobody waits for it
