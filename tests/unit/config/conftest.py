from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_toml(tmp_path: Path) -> Callable[[str], Path]:
    """Write `text` as run.toml in a fresh folder and return its path."""

    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write
