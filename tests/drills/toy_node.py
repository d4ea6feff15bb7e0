"""A rank on a node of its own: `toy_node.py JSON`. Two of them save one checkpoint, and give their shares to keepers.

Prints the state digest once its share is kept, then waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.keeper_client import KeeperClient, give_share
from surefoot.checkpoint.keeper_wire import run_token
from surefoot.checkpoint.manifest import EXTRAS_NAME, MANIFEST_NAME, METADATA_NAME, manifest_from_json
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.state import collect
from surefoot.tensors.world import join_world

wishes = json.loads(sys.argv[1])
rank, root = int(os.environ["RANK"]), Path(wishes["root"])
dist.init_process_group("gloo")
world = join_world(device=torch.device("cpu"), collective_limit_s=60.0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
for layer in model:
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
optimizer.zero_grad()
draft = manifest_from_json({**wishes["draft"], "files": [], "tensors": []})
slot = Slot.create(rank=rank, number=0)
manifest = save(root, draft, state=collect(model, optimizer), extras={"cursor": {"next_sample": 7}}, world=world, slot=slot)

names = [MANIFEST_NAME, METADATA_NAME, EXTRAS_NAME] if rank == 0 else []  # what a job has once
files = {f"__{rank}_0.distcp": slot.image(), **{name: memoryview((root / manifest.id / name).read_bytes()) for name in names}}
for port in wishes["keepers"]:
    keeper = KeeperClient("127.0.0.1", port, run=wishes["run"], token=run_token(), generation=1)
    give_share(keeper, manifest.id, rank=rank, files=files)
print(manifest.state_digest, flush=True)
signal.pause()
