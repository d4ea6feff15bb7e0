"""Atoms on other ranks stay there for a whole attempt, and for no longer: the ledger tells a replay where they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.sections import CheckpointSection, ObserveSection, RunConfig, RunSection, TrainSection
from surefoot.guard import Guard
from surefoot.heal.episodes import Episode
from surefoot.observe.control import Order, append_order
from surefoot.observe.interventions import segments_of
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.live import read_lock
from tests.steerable import Points


class Turning(Points):
    rotation = 0


def train(*, rank: int, world_size: int, run_dir: Path, back_at: int = 0) -> list[tuple[int, int, int]]:
    """(attempt, step, rotation) of each step. At `back_at` somebody orders it back to step 8."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer, points = torch.optim.SGD(model.parameters(), lr=0.01), Turning()
    config = RunConfig(
        run=RunSection(name="turning", dir=str(run_dir)),
        train=TrainSection(num_steps=16),
        checkpoint=CheckpointSection(interval_steps=8, keep_last=9),
        observe=ObserveSection(ledger_look_s=0.0),
    )
    made = []
    with Guard(config, model=model, optimizer=optimizer, data=points, gradient_divisor=world_size) as guard:
        guard.restore()
        while guard.begin():
            rows = next(points)[0][rank::world_size]
            loss = model(rows).square().sum()
            loss.backward()
            if guard.judge(loss, len(rows)).proceeds:
                optimizer.step()
                guard.applied()
            optimizer.zero_grad()
            report = guard.finish()
            made.append((report.attempt, report.step, points.rotation))
            if rank == 0 and guard.step == back_at:
                back_at, lock = 0, read_lock(run_dir)
                assert lock is not None
                append_order(run_dir, Order("rollback", "ada@here", lock.job, "", "", {"to": 8, "confirmed": True}), clock=SystemClock())
    return made


def test_who_goes_back_in_the_middle_of_a_rotated_replay_has_atoms_where_they_belong(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    run_ranks(train, 2, run_dir=tmp_path)
    path = tmp_path / "ledger.jsonl"
    ledger, last = Ledger(path, clock=SystemClock(), by="rank 0"), read_ledger(path)[-1]
    told = Episode("", "outlier_loss", "", 14, 15, (56, 60), "replay", to_step=8).as_json()
    del told["id"]
    at: dict[str, Any] = {"generation": last.generation, "attempt": 2}
    opened = ledger.append(Event.EPISODE_OPENED, step=15, fields=told, **at)
    ledger.append(Event.ATTEMPT_STARTED, step=8, fields={"checkpoint": "s8-a1"}, **at)
    phase = {"checkpoint": "s8-a1", "episode": f"e{opened.seq}", "phase": "rotated"}
    ledger.append(Event.RUN_ROLLED_BACK, step=8, fields=phase, **at)
    made = run_ranks(train, 2, run_dir=tmp_path, back_at=9)[0]
    assert {(attempt, rotation) for attempt, _, rotation in made} == {(3, 1), (4, 0)}
    entries = read_ledger(path)
    assert [(part.attempt, part.rotation) for part in segments_of(entries, fold_lineage(entries))] == [(1, 0), (4, 0)]
