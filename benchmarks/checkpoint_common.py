"""What the parts of benchmarks/checkpoint.py share: a state to save and load, one save of it, and a clock for wall and CPU-seconds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.checkpoint.commit import prepare
from surefoot.checkpoint.save_plan import SavePlans
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.staging import Snapshot, bytes_of, local_tensor
from surefoot.checkpoint.state import LiveState, collect
from surefoot.config.presets import PRESETS
from surefoot.core.records import Manifest
from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model
from surefoot.tensors.world import World

LIMIT_S = 600.0


@dataclass
class Took:
    """Wall and CPU-seconds of this process, all threads."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class Bench:
    """One state, its host copies and a folder, all used again by every round."""

    work: Path
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    slots: list[Slot] = field(default_factory=list)
    plans: SavePlans = field(default_factory=SavePlans)
    num_saves: int = 0

    @property
    def root(self) -> Path:
        return self.work / "checkpoints"

    @property
    def state(self) -> LiveState:
        return collect(self.model, self.optimizer)

    def forward_backward(self) -> None:
        num_tokens = self.tokens.shape[1]
        positions = torch.arange(num_tokens).expand_as(self.tokens)
        logits = self.model(self.tokens, positions, torch.zeros_like(self.tokens))
        nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()  # type: ignore[no-untyped-call]  # torch's own

    def snapshot(self, *, overlap: bool, slot: Slot) -> Snapshot:
        """What a guard does on the loop's thread when a save is due."""
        self.num_saves += 1
        name = f"s{self.num_saves}-a1"
        work = prepare(draft(name), state=self.state, extras={"cursor": {}}, world=self.world, plans=self.plans, overlap=overlap)
        snapshot = Snapshot(slot, work)
        snapshot.begin()
        snapshot.start()
        return snapshot

    def claimed(self, slot: Slot) -> memoryview:
        """The memory of a slot, for a copy that is none of a save."""
        self.num_saves += 1
        work = prepare(draft(f"s{self.num_saves}-a1"), state=self.state, extras={}, world=self.world, plans=self.plans)
        return slot.claim(work.header)

    def remove_checkpoints(self) -> None:
        for folder in (self.root, self.work / "dcp"):
            shutil.rmtree(folder, ignore_errors=True)


def new_model(*, quick: bool) -> nn.Module:
    """On the meta device."""
    sizes: dict[str, Any] = dict(PRESETS["tiny" if quick else "124m"])
    return build_model(ModelSection(**sizes), 8192 if quick else 50304, seed=1)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def new_tokens(*, quick: bool) -> torch.Tensor:
    return torch.randint(0, 8192, (1, 16 if quick else 64), generator=torch.Generator().manual_seed(0))


def fill(state: LiveState) -> None:
    """Random values, moments too."""
    for tensor in state.tensors.values():
        if tensor.is_floating_point() and tensor.dim():
            local_tensor(tensor).normal_(std=0.02)


def fill_touched(state: LiveState) -> None:
    """Something else than what is stored, in every page."""
    for tensor in state.tensors.values():
        local_tensor(tensor).fill_(1)


def draft(name: str) -> Manifest:
    return Manifest(
        format_version=0, id=name, run="bench", step=1, attempt=1, generation=1, parent=None, time_utc="2026-01-01T00:00:00.000Z",
        loss=1.0, tokens=1, state_digest="", config_hashes={}, data_hash="", code_version="0", topology={}, environment={}, ledger_seq=1,
        ledger_hash="", cursor={}, files=(), tensors=(),
    )  # fmt: skip


def memcpy_state(bench: Bench, slot: Slot) -> Took:
    """All bytes of this rank's state into memory that was touched before, with one thread. The slot is free afterwards."""
    sources = [values for tensor in bench.state.tensors.values() if (values := bytes_of(local_tensor(tensor))) is not None]
    target = np.frombuffer(bench.claimed(slot), dtype=np.uint8)

    def copy() -> None:
        at = 0
        for source in sources:
            target[at : at + len(source)] = source
            at += len(source)

    copy()
    with timed() as took:
        copy()
    slot.reset()
    return took


def stock_save(bench: Bench) -> Took:
    """Collective over the default group, where there is one. What an earlier one wrote must be gone."""
    writer = FileSystemWriter(bench.work / "dcp", sync_files=True)
    with timed() as took:
        dcp_save(dict(bench.state.tensors), storage_writer=writer, no_dist=bench.world.size == 1)
    return took


@contextmanager
def timed() -> Iterator[Took]:
    took = Took()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield took
    took.wall_s, took.cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s


def ordered(runs: dict[str, Callable[[], Any]], *, flip: bool) -> list[tuple[str, Callable[[], Any]]]:
    """Who goes first alternates, so that a machine that slows down or speeds up favours nobody."""
    return list(reversed(runs.items())) if flip else list(runs.items())


def refuse(error: Exception | None) -> None:
    if error is not None:
        raise error
