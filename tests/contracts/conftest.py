from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def modules_after() -> Callable[[str], set[str]]:
    """Run Python statements in a fresh interpreter and return the top-level modules that were loaded by them."""

    def run(statements: str) -> set[str]:
        code = f"{statements}\nimport json, sys\nsys.stderr.write('\\n' + json.dumps(sorted(sys.modules)))"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
        return {name.partition(".")[0] for name in json.loads(child.stderr.splitlines()[-1])}

    return run


@pytest.fixture(scope="session")
def surefoot() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a process of its own, as a person would."""

    def run(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "surefoot.cli.main", *arguments]
        environment = {**os.environ, **(env or {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=cwd or ROOT, env=environment)

    return run
