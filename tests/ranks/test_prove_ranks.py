"""What the ranks of a proof find: every tensor on every topology, and damage named alike on all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.checkpoint.prove_rank import load_and_compare
from surefoot.core.records import Problem
from surefoot.tensors.world import join_world

FROZEN = Path(__file__).parents[1] / "fixtures" / "checkpoint_v1" / "s4-a1"


def problems_here(*, rank: int, world_size: int, path: str, dim: int, budget_bytes: int) -> list[Problem]:
    del rank, world_size
    world = join_world(device=torch.device("cpu"), collective_limit_s=60.0)
    return load_and_compare(Path(path), world=world, dim=dim, budget_bytes=budget_bytes)


@pytest.mark.parametrize(("world_size", "dim", "budget_bytes"), [(2, 0, 1 << 30), (3, 1, 5000), (4, 0, 1000)])
def test_every_topology_loads_the_same_bits(run_ranks: Callable[..., Any], world_size: int, dim: int, budget_bytes: int) -> None:
    found = run_ranks(problems_here, world_size, path=str(FROZEN), dim=dim, budget_bytes=budget_bytes)
    assert found == [[]] * world_size


def test_damage_is_named_alike_on_all_ranks(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(FROZEN, tmp_path / FROZEN.name))
    file = copied / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[50_000] ^= 4
    file.write_bytes(content)
    found = run_ranks(problems_here, 3, path=str(copied), dim=0, budget_bytes=1 << 30)
    assert found[0] == found[1] == found[2]
    assert {problem.file for problem in found[0]} == {"__0_0.distcp"}
