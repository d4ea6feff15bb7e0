"""The checkpoint benchmark runs: the rows of a tiny state, real processes for ranks and loads. What it measures so is worth nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"
ROWS = {
    "steps": ("quiet_steps_s", "extra_wall_s", "fair_share_s"),
    "loads": ("load_warm_s", "load_cold_s", "load_memory_s", "dcp_load_warm_again_cpu_s"),
    "two-ranks": ("2r_blocked_overlap_s", "2r_save_cpu_s", "2r_dcp_save_cpu_s", "2r_extra_wall_s"),
}


@pytest.mark.timeout(300)  # a dozen processes that import torch
@pytest.mark.parametrize("group", ["steps", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("loads", "two-ranks"))])
def test_each_group_tells_its_rows(group: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--rounds", "1", "--only", group, "--work", str(tmp_path / "bench")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert told.returncode == 0, told.stderr
    row = next(json.loads(line) for line in told.stdout.splitlines() if line.startswith('{"round"'))
    assert set(ROWS[group]) <= row.keys()
    assert not (tmp_path / "bench").exists()
