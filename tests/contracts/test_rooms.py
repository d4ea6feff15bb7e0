"""Who may import whom, and which rooms load no torch: the first by reading the code, the second by loading it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import surefoot

HEAVY = {"torch", "pyarrow", "wandb", "tokenizers"}
TORCH_FREE_ROOMS = ("core", "config", "plan", "coordinate", "observe", "launch", "report", "heal")


def modules_of(room: str) -> list[str]:
    prefix = f"surefoot.{room}."
    folder = str(Path(surefoot.__path__[0]) / room)
    return [f"surefoot.{room}", *(module.name for module in pkgutil.walk_packages([folder], prefix))]


def test_imports_keep_the_contracts(root: Path) -> None:
    program = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([program, "--no-logo", "--no-cache"], cwd=root, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("room", TORCH_FREE_ROOMS)
def test_torch_free_rooms_load_no_torch(room: str, modules_after: Callable[[str], set[str]]) -> None:
    loaded = modules_after("\n".join(f"import {name}" for name in modules_of(room)))
    assert "surefoot" in loaded
    assert "torch" not in loaded


def test_data_without_its_loader_loads_no_torch(modules_after: Callable[[str], set[str]]) -> None:
    names = [name for name in modules_of("data") if name not in ("surefoot.data.loader", "surefoot.data.batches")]
    assert "torch" not in modules_after("\n".join(f"import {name}" for name in names))


def test_the_package_alone_loads_nothing_heavy(modules_after: Callable[[str], set[str]]) -> None:
    assert not modules_after("import surefoot") & (HEAVY | {"numpy", "pydantic", "typer"})
    assert not modules_after("from surefoot import RunConfig, ConfigError, StepReport, load_config") & (HEAVY | {"numpy"})


def test_the_check_sees_torch_where_it_is(modules_after: Callable[[str], set[str]]) -> None:
    assert "torch" in modules_after("import surefoot.tensors.world")
