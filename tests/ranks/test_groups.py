"""Process groups: each has a finite timeout and says by its name what it is for, and so does what is left when a collective fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surefoot.core.errors import PeerLost
from surefoot.core.sections import LaunchSection, ModelSection, ParallelSection
from surefoot.model.loss import loss_of
from surefoot.tensors.batch import Batch
from surefoot.tensors.flight import MAX_COLLECTIVES, evidence_path, group_states, keep_evidence_at, last_collectives
from surefoot.tensors.process_group import connected
from surefoot.tensors.world import Exchanges, World, gather_json, gather_words, join_world, reduce_sum
from tests.ranks.cutting import cut_model

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
LIMIT_S = 77.0


def train_once(world: World, parallel: ParallelSection) -> None:
    section = ModelSection(num_layers=1, d_model=16, num_heads=2, d_ff=16)
    model_cut = cut_model(section, parallel, world=world, vocab_size=64, collective_limit_s=LIMIT_S)
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    atom = Batch(zeros, zeros, torch.arange(4)[None], zeros, zeros[0, :1], num_live_tokens=4, atom=0)
    model_cut.runner.run([atom], start=lambda _: None, loss=loss_of)


def groups_of(*, rank: int, world_size: int, parallel: ParallelSection) -> tuple[dict[str, set[float]], set[str]]:
    """Name -> timeouts of all groups of this process, and the names that the flight recorder shows."""
    with connected(LaunchSection(collective_limit_s=LIMIT_S)) as world:
        train_once(world, parallel)
        reduce_sum(world, torch.ones(1))
        found: dict[str, set[float]] = {}
        for group in dist.distributed_c10d._world.pg_map:
            timeout = group._get_backend(CPU).options._timeout
            found.setdefault(group.group_desc, set()).add(timeout.total_seconds())
        recorded = {shown["group"] for shown in last_collectives()}
    return found, recorded


@pytest.mark.parametrize("parallel", [ParallelSection(dp_replicate=2, dp_shard=2), ParallelSection(dp_shard=4)], ids=["hsdp-2x2", "fsdp-4"])
def test_every_group_has_the_configured_timeout_and_a_name_of_its_own(run_ranks: RunRanks, parallel: ParallelSection) -> None:
    names = ["default", "loop", "save", "pp", "dp_replicate", "dp_shard", "cp", "tp", "dp_shard_cp"]
    for found, recorded in run_ranks(groups_of, 4, init=False, parallel=parallel):
        assert found == {f"surefoot:{name}": {LIMIT_S} for name in names}
        used = {"surefoot:dp_shard_cp", "surefoot:loop"} | ({"surefoot:dp_replicate"} if parallel.dp_replicate > 1 else set())
        assert used <= recorded <= set(found)


def wait_in_vain(*, rank: int, world_size: int, run_dir: Path) -> str | None:
    """Rank 1 never comes to the second exchange of the loop."""
    keep_evidence_at(evidence_path(run_dir, generation=3, rank=rank))
    world = join_world(device=CPU, collective_limit_s=1.0)
    for _ in range(MAX_COLLECTIVES + 5):
        gather_words(world, torch.ones(2, dtype=torch.int64))
    if rank == 1:
        return None
    with pytest.raises(PeerLost) as caught:
        gather_words(world, torch.ones(3, dtype=torch.int64))
    return caught.value.hint


def test_a_collective_that_fails_leaves_what_was_under_way_by_name(run_ranks: RunRanks, tmp_path: Path) -> None:
    hint, _ = run_ranks(wait_in_vain, 2, run_dir=tmp_path)
    (path,) = tmp_path.rglob("*.json")
    assert path == tmp_path / "logs" / "g3" / "rank_0.collectives.json"
    assert str(path) in hint
    told = json.loads(path.read_text())
    assert told["what"] == "the exchange of the step"
    assert "Timed out" in told["error"]
    *_, last = told["collectives"]
    assert (last["group"], last["operator"], last["input_sizes"], last["timeout_s"]) == ("surefoot:loop", "gloo:all_gather", [[3]], 1.0)
    assert last["age_s"] >= 1.0
    assert told["newest_seq_by_group"]["surefoot:loop"] == MAX_COLLECTIVES + 6
    assert len(told["collectives"]) == MAX_COLLECTIVES
    assert path.stat().st_size < 400 * MAX_COLLECTIVES


def count_by_group(*, rank: int, world_size: int) -> list[dict[str, object]]:
    """Three exchanges of the loop, and the marks that exchanges of the main thread leave."""
    world = join_world(device=CPU, collective_limit_s=30.0)
    assert world.size == world_size
    entered: list[str] = []
    Exchanges.tell = entered.append
    gather_words(world, torch.ones(1, dtype=torch.int64))
    gather_json(world, rank)
    with ThreadPoolExecutor(1) as pool:  # not the thread that has to move
        pool.submit(gather_json, world, rank).result()
    Exchanges.tell = None
    assert entered == ["loop", "", "save", ""]
    for _ in range(2):
        reduce_sum(world, torch.ones(1))
    until_s = time.monotonic() + 10.0
    while True:  # torch marks a collective as done a moment after the one who waited for it goes on
        states = [state for state in group_states() if state["name"] == "surefoot:loop"]
        if states[0]["last_completed"] == states[0]["last_enqueued"] or time.monotonic() > until_s:
            return states


def test_a_rank_says_what_it_has_enqueued_and_finished_by_group(run_ranks: RunRanks) -> None:
    for states in run_ranks(count_by_group, 2):
        (state,) = states
        assert (state["last_enqueued"], state["last_completed"], state["operation"]) == (3, 3, "gloo:all_reduce")
        assert (state["shapes"], state["dtypes"], state["is_p2p"]) == ([[1]], ["Float"], False)
