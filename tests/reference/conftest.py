"""Published figures that the project may not ship: a folder `shared` beside the checkout, or the one that SUREFOOT_REFERENCE names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("SUREFOOT_REFERENCE") or Path(__file__).parents[3] / "shared") / "data"


@pytest.fixture(scope="session")
def planning_data() -> Path:
    """The folder of scaling points and throughput tables; the test is skipped, with a reason, where there is none."""
    folder = ROOT / "planning"
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}")
    return folder


@pytest.fixture(scope="session")
def stability_data() -> Path:
    """The folder of training curves; the test is skipped, with a reason, where there is none."""
    folder = ROOT / "stability"
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}")
    return folder


@pytest.fixture(scope="session")
def ops_data() -> Path:
    """The folder of what drivers and kernels of real clusters print; the test is skipped, with a reason, where there is none."""
    folder = ROOT / "ops"
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}")
    return folder
