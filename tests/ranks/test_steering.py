"""The blocklist on real ranks of a foreign loop: all take it at one sample, whoever is killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.blocking import Block
from surefoot.core.errors import DataError
from surefoot.core.sections import CheckpointSection, RunConfig, RunSection, TrainSection
from surefoot.guard import Guard
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.ledger import read_ledger, verify_ledger
from tests.steerable import Ahead, KnowingPoints, ask, began_with, final_digest, mask, skip, taken, until_committed

RunRanks = Callable[..., list[Any]]
WISHES = (mask(21, 24, name="poison"), skip(30, 33))  # of the step that begins at 20 the second rank has no live row


class Deadly(KnowingPoints):
    """Kills its rank while the group takes the blocklist, before anything of it is ledgered."""

    def block(self, block: Block) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stubborn(KnowingPoints):
    def block(self, block: Block) -> None:
        raise DataError("this rank holds other data", where="port")


class Named(KnowingPoints):
    """Knows its data by content."""

    data_hash = "ab" * 32
    data_change = None


class OtherData(Named):
    data_hash = "cd" * 32


PORTS = {"plain": KnowingPoints, "deadly": Deadly, "stubborn": Stubborn, "named": Named, "other data": OtherData}


def train(
    *,
    rank: int,
    world_size: int,
    run_dir: Path,
    wishes: tuple[Block, ...] = (),
    port: str = "plain",
    lead_port: str = "plain",
    kill_at: int = 0,
) -> tuple[list[int], tuple[int, str]]:
    """Ask after step 4, on rank 0; rank 1 has the `port`, rank 0 the `lead_port`. Rank 1 kills itself at `kill_at`."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    points, clock = PORTS[port if rank == 1 else lead_port](), Ahead()
    config = RunConfig(
        run=RunSection(name="foreign", dir=str(run_dir)),
        train=TrainSection(num_steps=12),
        checkpoint=CheckpointSection(interval_steps=4, keep_last=9),
    )
    next_samples = []
    with Guard(config, model=model, optimizer=optimizer, data=points, clock=clock, gradient_divisor=world_size) as guard:
        guard.restore()
        while guard.begin():
            rows = next(points)[0][rank::world_size]
            if rank == 1 and guard.step == kill_at > 0:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(rows).square().sum()
            loss.backward()
            if guard.judge(loss, len(rows)).proceeds:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(guard.clip_scale)
                optimizer.step()
                guard.applied()
            optimizer.zero_grad()
            next_samples.append(guard.finish().next_sample)
            clock.ahead_s += 2.0
            if rank == 0 and guard.step == 4 and wishes:
                until_committed(run_dir)
                ask(run_dir, *wishes)
    return next_samples, points.blocklist


def test_all_ranks_take_a_wish_at_one_sample_as_a_run_that_knew_it_from_the_start(run_ranks: RunRanks, tmp_path: Path) -> None:
    live, knew, other = tmp_path / "live", tmp_path / "knew", tmp_path / "other"
    told = run_ranks(train, 2, run_dir=live, wishes=WISHES)
    assert told[0] == told[1]
    next_samples, blocklist = told[0]
    assert taken(live) == [("poison", 20, "eve"), ("30:33", 20, "eve")]
    assert next_samples == [4, 8, 12, 16, 20, 24, 28, 35, 39, 43, 47, 51]
    log = fold_blocks(read_ledger(live / "ledger.jsonl"))
    assert blocklist == (log.count, log.head)
    began_with(knew, log.blocks)
    assert run_ranks(train, 2, run_dir=knew)[0][0] == next_samples
    assert final_digest(knew) == final_digest(live)
    run_ranks(train, 2, run_dir=other)
    assert final_digest(other) != final_digest(live)


@pytest.mark.parametrize(("port", "kill_at", "since"), [("deadly", 0, 16), ("plain", 5, 20)])
def test_a_rank_killed_around_the_take_leaves_all_or_nothing(
    port: str, kill_at: int, since: int, run_ranks: RunRanks, tmp_path: Path
) -> None:
    """Killed before the entry was ledgered, the wish is met by the next start; killed after it, nothing is asked a second time."""
    run_dir, knew = tmp_path / "run", tmp_path / "knew"
    with pytest.raises(AssertionError, match="died"):
        run_ranks(train, 2, run_dir=run_dir, wishes=WISHES, port=port, kill_at=kill_at)
    assert len(taken(run_dir)) == (2 if kill_at else 0)
    told = run_ranks(train, 2, run_dir=run_dir)
    assert told[0] == told[1]
    assert taken(run_dir) == [("poison", since, "eve"), ("30:33", since, "eve")]
    log = fold_blocks(read_ledger(run_dir / "ledger.jsonl"))
    assert not log.open
    assert verify_ledger(run_dir / "ledger.jsonl").ok
    began_with(knew, log.blocks)
    run_ranks(train, 2, run_dir=knew)
    assert final_digest(knew) == final_digest(run_dir)


def test_ranks_whose_ports_disagree_are_named_and_nothing_is_taken(run_ranks: RunRanks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] take other entries into the blocklist than rank 0"):
        run_ranks(train, 2, run_dir=tmp_path / "run", wishes=WISHES, port="stubborn")
    assert not taken(tmp_path / "run")


@pytest.mark.parametrize(("ports", "words"), [(("named", "other data"), "abababababab"), (("plain", "other data"), "without identity")])
def test_ranks_that_would_train_on_other_data_are_named_before_a_fresh_start(
    ports: tuple[str, str], words: str, run_ranks: RunRanks, tmp_path: Path
) -> None:
    with pytest.raises(
        AssertionError, match=rf"DataError: .*rank 1 of 2 would train on data that is not rank 0's: cdcdcdcdcdcd and {words}"
    ):
        run_ranks(train, 2, run_dir=tmp_path / "run", port=ports[1], lead_port=ports[0])
    assert "attempt.started" not in [entry.event for entry in read_ledger(tmp_path / "run" / "ledger.jsonl")]


def test_ranks_with_the_same_data_start(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(train, 2, run_dir=tmp_path / "run", port="named", lead_port="named")
    assert read_ledger(tmp_path / "run" / "ledger.jsonl")[-1].event == "run.finished"
