"""After a fault the node is probed when it is wished, and what is found stands beside the evidence."""

from __future__ import annotations

import json
from pathlib import Path

from surefoot.coordinate.probes.run import QUICK
from surefoot.core.sections import LaunchSection
from surefoot.launch.probing import probe_after_fault


def test_nothing_is_probed_unasked(tmp_path: Path) -> None:
    evidence = tmp_path / "g1.json"
    evidence.write_text('{"a": 1}')
    assert probe_after_fault(LaunchSection(), run_dir=tmp_path, evidence=evidence, since_boot_s=0.0, look=lambda: None) == ()
    assert json.loads(evidence.read_text()) == {"a": 1}


def test_what_is_found_stands_in_the_incident(tmp_path: Path) -> None:
    settings = LaunchSection(probe_after_fault="quick", probe_limit_s=60.0)
    evidence, looks = tmp_path / "g1.json", []
    evidence.write_text('{"a": 1}')
    results = probe_after_fault(settings, run_dir=tmp_path, evidence=evidence, since_boot_s=0.0, look=lambda: looks.append(1))
    assert [result.name for result in results] == list(QUICK)
    incident = json.loads(evidence.read_text())
    assert incident["a"] == 1
    assert [probe["name"] for probe in incident["probes"]] == list(QUICK)
    assert looks  # the agent goes on looking after the rest


def test_evidence_that_cannot_be_read_stops_nothing(tmp_path: Path) -> None:
    settings = LaunchSection(probe_after_fault="quick", probe_limit_s=60.0)
    assert len(probe_after_fault(settings, run_dir=tmp_path, evidence=tmp_path / "absent", since_boot_s=0.0, look=lambda: None)) == len(
        QUICK
    )
