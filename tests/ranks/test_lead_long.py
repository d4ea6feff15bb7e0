"""A part of one rank that takes longer than a collective may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from surefoot.core.errors import Corrupt
from surefoot.tensors.world import join_world, lead_long, single_world

RunRanks = Callable[..., list[Any]]


def _fetch_for(seconds: float, *, then: str) -> str:
    threading.Event().wait(seconds)
    if then == "fail":
        raise Corrupt("whole nowhere", where="store")
    return then


def _lead(*, rank: int, world_size: int, then: str) -> str:
    world = join_world(device=torch.device("cpu"), collective_limit_s=2.0)
    try:
        return lead_long(world, lambda: _fetch_for(5.0, then=then), beat_s=0.3)
    except Corrupt as error:
        return error.what


def test_the_others_hear_that_it_goes_on(run_ranks: RunRanks) -> None:
    assert run_ranks(_lead, 2, then="done") == ["done", "done"]


def test_all_raise_what_it_raised(run_ranks: RunRanks) -> None:
    assert run_ranks(_lead, 2, then="fail") == ["whole nowhere", "whole nowhere (on rank 0)"]


def test_one_rank_alone_waits_for_itself() -> None:
    world = single_world()
    assert lead_long(world, lambda: False, beat_s=0.01) is False
    with pytest.raises(Corrupt):
        lead_long(world, lambda: _fetch_for(0.03, then="fail"), beat_s=0.01)
