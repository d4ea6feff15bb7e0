"""Ranks that do meet: a gloo all-reduce per step over the store of the agent's port; rank 1 kills itself in the first generations."""

from __future__ import annotations

import datetime
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from surefoot.coordinate.beats import BeatBoard
from surefoot.core.records import Phase

NUM_KILLED_GENERATIONS = int(os.environ.get("TOY_KILLED_GENERATIONS", "10"))
STEPS_PER_GENERATION = 2


def main() -> None:
    rank, world_size, generation = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "SUREFOOT_GENERATION"))
    run_dir = Path(os.environ["SUREFOOT_RUN_DIR"])
    torch.set_num_threads(1)
    slot = BeatBoard.attach(int(os.environ["SUREFOOT_BEATS_FD"])).slot(rank)
    slot.beat(phase=Phase.RESTORE)
    limit = datetime.timedelta(seconds=30)
    listen_fd = int(os.environ["SUREFOOT_LISTEN_FD"]) if rank == 0 else None
    port = int(os.environ["MASTER_PORT"])
    # torch re-exports TCPStore from its C part without saying so
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, limit, master_listen_fd=listen_fd)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    first = (generation - 1) * STEPS_PER_GENERATION
    for step in range(first, first + STEPS_PER_GENERATION):
        slot.beat(phase=Phase.STEP, step=step + 1, restored=True)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size
    if generation <= NUM_KILLED_GENERATIONS:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    if rank == 0:
        (run_dir / "met").write_text(str(generation))
    dist.destroy_process_group()
