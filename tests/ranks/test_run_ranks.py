"""The helper that all rank tests stand on: results by rank, failures by name, hangs ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RunRanks = Callable[..., list[Any]]


@dataclass(frozen=True)
class Sum:
    rank: int
    total: torch.Tensor


def sum_of_ranks(*, rank: int, world_size: int, scale: int) -> Sum:
    total = torch.tensor([scale * (rank + 1)])
    dist.all_reduce(total)
    assert torch.get_num_threads() == 1
    return Sum(rank=rank, total=total)


def raise_on_one(*, rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the batch is empty")
    dist.barrier()


def die_on_one(*, rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def hang_on_one(*, rank: int, world_size: int, pid_path: str) -> None:
    if rank == 0:
        Path(pid_path).write_text(str(os.getpid()))
        time.sleep(1000)


def without_group(*, rank: int, world_size: int) -> tuple[int, int, bool]:
    return rank, world_size, dist.is_initialized()


def test_all_reduce_on_four_ranks(run_ranks: RunRanks) -> None:
    results = run_ranks(sum_of_ranks, 4, scale=10)
    assert [result.rank for result in results] == [0, 1, 2, 3]
    assert [result.total.item() for result in results] == [100] * 4


def test_no_group_when_not_asked_for(run_ranks: RunRanks) -> None:
    assert run_ranks(without_group, 2, init=False) == [(0, 2, False), (1, 2, False)]


def test_exception_is_reported_by_rank(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 raised:(?s:.*)raise_on_one(?s:.*)ValueError: the batch is empty"):
        run_ranks(raise_on_one, 2)


def test_dead_rank_is_named(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match="rank 1 died: signal 9"):
        run_ranks(die_on_one, 2)


def test_hang_is_ended(run_ranks: RunRanks, tmp_path: Path) -> None:
    pid_path = tmp_path / "pid"
    with pytest.raises(AssertionError, match=r"rank 0 did not end \(limit 3 s\)"):
        run_ranks(hang_on_one, 2, timeout_s=3, init=False, pid_path=str(pid_path))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_path.read_text()), 0)
