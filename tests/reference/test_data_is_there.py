from __future__ import annotations

from pathlib import Path


def test_the_tables_are_those_that_the_other_tests_read(planning_data: Path) -> None:
    assert (planning_data / "chinchilla_epoch_svg_extracted.csv").read_text().count("\n") >= 245
