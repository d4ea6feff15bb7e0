"""Saves beside a loop on real ranks: one verdict for all of them at the same step, whatever happens to one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import verify
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import CheckpointSection, RunConfig, RunSection, TrainSection
from surefoot.guard import Guard
from surefoot.observe.ledger import read_ledger

RunRanks = Callable[..., list[Any]]
WIDTH = 256
HOLD_LIMIT_S = 60


class Points:
    def __init__(self) -> None:
        self.next_sample = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.next_sample += 2
        return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(self.next_sample))

    def cursor(self) -> Mapping[str, Any]:
        return {"next_sample": self.next_sample}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]


def model_of(layout: str, *, world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    if layout == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(next(model.children()), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def config_of(run_dir: Path, *, num_steps: int = 8, **checkpoint: Any) -> RunConfig:
    section: dict[str, Any] = {"interval_steps": 4, "keep_last": 20, "milestone_steps": 0, **checkpoint}
    return RunConfig(
        run=RunSection(name="ranks", dir=str(run_dir)), train=TrainSection(num_steps=num_steps), checkpoint=CheckpointSection(**section)
    )


def train(
    config: RunConfig,
    *,
    rank: int,
    world_size: int,
    layout: str,
    fused: bool = False,
    after_finish: Callable[[int, Callable[[], None]], None] = lambda step, force: None,
    on_model: Callable[[nn.Module], None] = lambda model: None,
) -> list[str | None]:
    """A small loop; the ids that each step said were saved. `after_finish` gets the step and a way to update out of turn."""
    model = model_of(layout, world_size=world_size)
    on_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, foreach=not fused)
    points = Points()
    saved = []

    def force_a_step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    with Guard(config, model=model, optimizer=optimizer, data=points, gradient_divisor=world_size) as guard:
        guard.restore()
        while guard.begin():
            loss = model(next(points)).square().sum()
            loss.backward()
            if guard.judge(loss, 2).proceeds:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(guard.clip_scale)
                optimizer.step()
                guard.applied()
            optimizer.zero_grad()
            saved.append(guard.finish().saved)
            after_finish(guard.step, force_a_step)
    return saved


def entries_of(run_dir: Path, event: str) -> list[LedgerEntry]:
    return [entry for entry in read_ledger(run_dir / "ledger.jsonl") if entry.event == event]


class HeldUp:
    """Holds each staging thread of this process up where it begins, until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        threading.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if threading.current_thread().name.startswith("surefoot-staging"):
            assert self.may_go_on.wait(HOLD_LIMIT_S)
        sys.setprofile(None)


def train_plainly(*, rank: int, world_size: int, run_dir: Path, layout: str, overlap: bool = True) -> list[str | None]:
    return train(config_of(run_dir, overlap=overlap), rank=rank, world_size=world_size, layout=layout)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_ranks_that_save_beside_their_loop_save_the_bits_of_ranks_that_stop(run_ranks: RunRanks, tmp_path: Path, layout: str) -> None:
    beside = run_ranks(train_plainly, 2, run_dir=tmp_path / "beside", layout=layout)
    run_ranks(train_plainly, 2, run_dir=tmp_path / "stopping", layout=layout, overlap=False)
    assert beside[0] == beside[1]  # all ranks learn of a commit at the same step
    for name in ("s4-a1", "s8-a1"):
        found = [read_manifest(tmp_path / run / "checkpoints" / name) for run in ("beside", "stopping")]
        assert found[0].state_digest == found[1].state_digest
        assert verify(tmp_path / "beside" / "checkpoints" / name) == []
        assert {file.rank for file in found[0].files} == {-1, 0, 1}
    assert entries_of(tmp_path / "beside", "snapshot.torn") == []


def train_with_a_forced_step(*, rank: int, world_size: int, run_dir: Path, layout: str, fused: bool, forced_on: int) -> list[str | None]:
    held_up = HeldUp()

    def meddle(step: int, force: Callable[[], None]) -> None:
        if step == 4:
            if rank == forced_on or forced_on < 0:
                force()
            held_up.may_go_on.set()

    return train(config_of(run_dir), rank=rank, world_size=world_size, layout=layout, fused=fused, after_finish=meddle)


@pytest.mark.parametrize(("layout", "fused"), [("fsdp", True), ("fsdp", False), ("ddp", True)])
def test_a_step_out_of_turn_on_all_ranks_tears_the_snapshot(run_ranks: RunRanks, tmp_path: Path, layout: str, fused: bool) -> None:
    saved = run_ranks(train_with_a_forced_step, 2, run_dir=tmp_path, layout=layout, fused=fused, forced_on=-1)
    _assert_torn(tmp_path, saved)


def test_a_step_out_of_turn_on_one_rank_tears_the_snapshot_of_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    saved = run_ranks(train_with_a_forced_step, 2, run_dir=tmp_path, layout="fsdp", fused=True, forced_on=1)
    assert "(rank 1)" in _assert_torn(tmp_path, saved)


def _assert_torn(run_dir: Path, saved: list[list[str | None]]) -> str:
    (torn,) = entries_of(run_dir, "snapshot.torn")
    assert torn.fields["id"] == "s4-a1"
    assert torn.step in (5, 6)
    assert "s4-a1" not in published(run_dir / "checkpoints")
    assert f"s{torn.step}-a1" in published(run_dir / "checkpoints")
    assert verify(run_dir / "checkpoints" / f"s{torn.step}-a1") == []
    assert saved[0] == saved[1]
    assert not list((run_dir / "checkpoints").glob(".*"))
    return torn.reason


def train_and_load_with_stock_dcp(*, rank: int, world_size: int, run_dir: Path, layout: str) -> bool:
    train(config_of(run_dir), rank=rank, world_size=world_size, layout=layout)
    model = model_of("fsdp", world_size=world_size)
    optimizer = torch.optim.AdamW(model.parameters())
    state = dict(collect(model, optimizer).tensors)
    dcp_load(state, checkpoint_id=run_dir / "checkpoints" / "s8-a1")
    whole = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in state.items()}
    return all(bool(tensor.isfinite().all()) for tensor in whole.values()) and float(whole["optim.0.weight.step"]) == 8.0


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_stock_dcp_loads_on_two_ranks_what_two_ranks_saved(run_ranks: RunRanks, tmp_path: Path, layout: str) -> None:
    assert run_ranks(train_and_load_with_stock_dcp, 2, run_dir=tmp_path, layout=layout) == [True, True]


def train_with_a_disk_in_the_way(*, rank: int, world_size: int, run_dir: Path) -> list[str | None]:
    """The folder of the checkpoints is a file until a failed save was said."""
    in_the_way = run_dir / "checkpoints"

    def look(step: int, force: Callable[[], None]) -> None:
        if rank == 0 and in_the_way.is_file() and entries_of(run_dir, "save.failed"):
            in_the_way.unlink()

    return train(config_of(run_dir, num_steps=200), rank=rank, world_size=world_size, layout="fsdp", after_finish=look)


def test_a_failure_of_the_background_is_said_and_the_run_goes_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    saved = run_ranks(train_with_a_disk_in_the_way, 2, run_dir=tmp_path)
    assert saved[0] == saved[1]
    failed = entries_of(tmp_path, "save.failed")
    assert "File exists" in failed[0].reason
    assert "(rank 0)" in failed[0].reason
    assert entries_of(tmp_path, "checkpoint.committed")
    assert verify(tmp_path / "checkpoints" / "s200-a1") == []


def leave_staging_to_an_error(*, rank: int, world_size: int, run_dir: Path) -> float:
    """Rank 1 ends with an error right after a save began; how long rank 0 then takes to end."""
    started_s = 0.0

    def fail(step: int, force: Callable[[], None]) -> None:
        nonlocal started_s
        if step == 4:
            started_s = time.monotonic()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config_of(run_dir), rank=rank, world_size=world_size, layout="ddp", after_finish=fail)
    return time.monotonic() - started_s


def test_an_error_of_the_loop_does_not_wait_long_for_uploads(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert max(run_ranks(leave_staging_to_an_error, 2, run_dir=tmp_path)) < 30


def train_with_a_bug_on_rank_1(*, rank: int, world_size: int, run_dir: Path) -> list[str | None]:
    """Its state_dict raises at the save after step 4, and never again."""
    at = 0

    def note(step: int, force: Callable[[], None]) -> None:
        nonlocal at
        at = step

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        if rank == 1 and at == 3:
            raise ZeroDivisionError("a bug of the caller")

    def on_model(model: nn.Module) -> None:
        model.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    return train(config_of(run_dir), rank=rank, world_size=world_size, layout="ddp", after_finish=note, on_model=on_model)


def test_what_the_callers_code_raises_on_one_rank_is_told_to_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    saved = run_ranks(train_with_a_bug_on_rank_1, 2, run_dir=tmp_path)
    assert saved[0] == saved[1]
    (failed,) = entries_of(tmp_path, "save.failed")
    assert "ZeroDivisionError: a bug of the caller" in failed.reason
    assert "(on rank 1)" in failed.reason
    assert published(tmp_path / "checkpoints") == ["s5-a1", "s8-a1"]
