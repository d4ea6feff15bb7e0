"""kill -9 in the middle of saves: what was published before stays whole, and no half is ever published."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.retention import sweep
from surefoot.checkpoint.verify import verify

SAVER = """
import dataclasses, importlib.util, itertools, pathlib, sys
import torch
from surefoot.checkpoint.commit import save
from surefoot.checkpoint.state import collect
from surefoot.tensors.world import single_world

spec = importlib.util.spec_from_file_location("helpers", sys.argv[2])
helpers = importlib.util.module_from_spec(spec)
sys.modules["helpers"] = helpers
spec.loader.exec_module(helpers)
training = helpers.new_training(width=200_000)  # 14 MB of state: long enough to be caught writing
training.step()
for number in itertools.count(1):
    save(pathlib.Path(sys.argv[1]), helpers.new_draft(f"s{number}-a1"), state=collect(training.model, training.optimizer),
         extras={"cursor": {}}, world=single_world())
    print(number, flush=True)
"""


def _is_writing(root: Path, *, moment: str) -> bool:
    for scratch in root.glob(".*.writing"):
        try:
            names = {entry.name: entry.stat().st_size for entry in scratch.iterdir()}
        except FileNotFoundError:
            continue  # it was published meanwhile
        if moment in names and names[moment] > 0:
            return True
    return False


@pytest.mark.parametrize("moment", ["__0_0.distcp", ".metadata", "extras.json"])
def test_a_killed_save_leaves_the_one_before(tmp_path: Path, moment: str) -> None:
    """`moment` is the newest file of the folder when the kill comes."""
    root = tmp_path / "checkpoints"
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(root), str(Path(__file__).with_name("conftest.py"))], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    deadline_s = time.monotonic() + 60
    while not _is_writing(root, moment=moment):
        assert time.monotonic() < deadline_s
    os.kill(process.pid, signal.SIGKILL)
    acknowledged = [1, *map(int, process.stdout.read().split())]
    process.wait()
    process.stdout.close()
    ids = published(root)
    assert set(ids) >= {f"s{number}-a1" for number in acknowledged}
    assert len(ids) <= len(acknowledged) + 1  # the last may have been published in the moment of the kill
    assert all(verify(root / name) == [] for name in ids[-3:])
    sweep(root, generation=2)
    assert sorted(entry.name for entry in root.iterdir()) == sorted(ids)
