"""Listings without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from surefoot.checkpoint.inspect import num_bytes, published, read_ref
from surefoot.checkpoint.manifest import read_manifest


def test_published_ones_are_listed_by_step(tmp_path: Path) -> None:
    for name in ("s9-a1", "s10-a1", "s10-a1-r1", "s10-a2", ".s11-a1.g1.writing", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "s12-a1").mkdir()
    assert published(tmp_path) == ["s9-a1", "s10-a1", "s10-a1-r1", "s10-a2"]
    assert published(tmp_path / "absent") == []


def test_a_ref_tells_what_the_manifest_says(committed: Path) -> None:
    ref, manifest = read_ref(committed), read_manifest(committed)
    assert (ref.id, ref.step, ref.attempt, ref.parent, ref.state_digest) == ("s10-a1", 10, 1, None, manifest.state_digest)
    on_disk = sum(file.stat().st_size for file in committed.iterdir() if file.name != "manifest.json")
    assert ref.num_bytes == num_bytes(manifest) == on_disk


def test_neither_listing_nor_its_command_loads_torch() -> None:
    code = "import sys, surefoot.checkpoint.inspect, surefoot.cli.checkpoint; print([m for m in ('torch', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
