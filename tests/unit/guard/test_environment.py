"""Which device each rank has: told at the start, and no part of what decides bits."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from surefoot.guard.environment import gather_devices
from surefoot.tensors.world import World


def test_the_device_of_each_rank_is_told_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"1a2b-{index}"))
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert gather_devices(World(0, 1, torch.device("cuda", 3))) == {socket.gethostname(): {"0": [5, "GPU-1a2b-3"]}}
    assert gather_devices(World(0, 1, torch.device("cpu"))) == {}
