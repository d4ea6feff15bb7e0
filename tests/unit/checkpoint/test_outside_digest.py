"""A script that knows only stock torch and numpy computes the state digest that the manifest names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.state import collect
from surefoot.core.records import Manifest
from surefoot.tensors.world import World

SCRIPT = Path(__file__).parents[3] / "examples" / "outside_digest.py"


def _outside(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True, timeout=100)


def test_the_script_imports_nothing_of_ours() -> None:
    assert "import surefoot" not in SCRIPT.read_text()
    assert "from surefoot" not in SCRIPT.read_text()


def test_it_prints_the_digest_of_the_manifest(tmp_path: Path, make_draft: Callable[..., Manifest], world: World) -> None:
    model = nn.ModuleList([nn.Linear(300, 300), nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3, dtype=torch.float64)])
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("spectrum", torch.view_as_complex(torch.randn(3, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    manifest = save(tmp_path, make_draft(), state=collect(model, optimizer), extras={}, world=world)
    done = _outside(tmp_path / "s10-a1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == manifest.state_digest


def test_it_fails_when_they_differ(committed: Path, training: Any, make_draft: Callable[..., Manifest], world: World) -> None:
    training.step(seed=3)
    save(committed.parent, make_draft("s20-a1"), state=collect(training.model, training.optimizer), extras={}, world=world)
    (committed / "manifest.json").write_bytes((committed.parent / "s20-a1" / "manifest.json").read_bytes())
    done = _outside(committed)
    assert done.returncode == 1
    assert "manifest.json says" in done.stderr
