"""Many saves in one process: its memory does not grow with their number."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.observe.ledger import read_ledger

PROGRAM = Path(__file__).with_name("saving_program.py")
WIDTH = 1 << 16
STATE_BYTES = 3 * 4 * WIDTH * 20  # parameters and both moments of 16 + 1 + 1 + 1 + 1 values a unit
NUM_STEPS, WARM_STEPS = 150, 50


@pytest.mark.timeout(300)
def test_fifty_saves_leave_nothing_behind(tmp_path: Path) -> None:
    """Both host copies are full after the first saves. Whatever later ones forget to free adds up: the bound is one copy in forty saves."""
    run_dir = tmp_path / "run"
    command = {"run_dir": str(run_dir), "num_steps": NUM_STEPS, "width": WIDTH}
    finished = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(command) + "\n",
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    output = run_dir.with_suffix(".out").read_text()
    assert finished.stdout.split()[-1] == "0", output[-3000:] + finished.stderr
    commits = [entry for entry in read_ledger(run_dir / "ledger.jsonl") if entry.event == "checkpoint.committed"]
    assert sum(int(str(entry.fields["step"])) > WARM_STEPS for entry in commits) >= 40
    resident = {int(step): int(num_bytes) for step, num_bytes in re.findall(r"^resident (\d+) (\d+)$", output, re.MULTILINE)}
    warm = max(resident[step] for step in range(WARM_STEPS - 10, WARM_STEPS))
    late = max(resident[step] for step in range(NUM_STEPS - 10, NUM_STEPS))
    told = f"resident {warm / 1e6:.1f} MB after {WARM_STEPS} steps, {late / 1e6:.1f} MB at the end"
    print(f"{len(commits)} saves of {STATE_BYTES / 1e6:.0f} MB: {told}")
    assert late - warm < STATE_BYTES, told
