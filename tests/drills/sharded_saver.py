"""Saves two checkpoints of one training, sharded over ranks: `sharded_saver.py ROOT STORE RANK WORLD_SIZE WIDTH`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.state import collect
from surefoot.core.records import Manifest
from surefoot.tensors.world import join_world

EXTRAS = {"cursor": {"next_sample": 7, "count": 3}, "loop": {"step": 10}}


def new_draft(name: str, *, step: int) -> Manifest:
    return Manifest(
        format_version=2, id=name, run="drill", step=step, attempt=1, generation=1, parent=None, time_utc="", loss=1.0, tokens=1,
        state_digest="", config_hashes={}, data_hash="", code_version="0", topology={}, environment={}, ledger_seq=1, ledger_hash="",
        cursor={}, files=(), tensors=(),
    )  # fmt: skip


def new_model(width: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.Linear(width, 5))


def main() -> None:
    root, store_path, rank, world_size, width = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)  # type: ignore[attr-defined]  # torch re-exports its C part
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    world = join_world(device=torch.device("cpu"), collective_limit_s=60.0)
    model = new_model(width)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step, name in ((10, "s10-a1"), (20, "s20-a1")):
        for parameter in model.parameters():
            parameter.grad = torch.cos(parameter.detach() + step)
        optimizer.step()
        optimizer.zero_grad()
        save(root, new_draft(name, step=step), state=collect(model, optimizer), extras=EXTRAS | {"loop": {"step": step}}, world=world)
    dist.barrier()
    os._exit(0)  # torch 2.13 may deadlock while it takes a gloo group apart


if __name__ == "__main__":
    main()
