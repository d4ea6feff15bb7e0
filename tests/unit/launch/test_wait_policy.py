"""Threads of CPU ranks sleep soon while they wait, unless the user or a GPU says otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from surefoot.launch.wait_policy import sees_gpu, wait_policy


def test_a_rank_on_the_cpu_soon_waits_asleep() -> None:
    added = wait_policy({"OMP_NUM_THREADS": "2"}, has_gpu=False)
    assert added == {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_users_own_setting_wins(name: str) -> None:
    assert wait_policy({name: "1"}, has_gpu=False) == {}


def test_beside_a_gpu_nothing_changes() -> None:
    assert wait_policy({}, has_gpu=True) == {}


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_none(hidden: str) -> None:
    assert not sees_gpu({"CUDA_VISIBLE_DEVICES": hidden})


@pytest.mark.parametrize("own", [None, "active"])
def test_the_ranks_inherit_it_from_where_torch_is_imported(
    own: str | None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if own is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    nursery: Any = request.getfixturevalue("nursery")  # started only now, in this environment
    nursery.start("facts")
    nursery.exits(1)
    facts = json.loads(nursery.out(0).read_text().splitlines()[1])
    assert facts["wait_policy"] == (own or "passive")
