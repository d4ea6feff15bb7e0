"""A plain PyTorch loop under surefoot.Guard. Run it, kill it, run it again: it ends with the same bits.

python examples/foreign_loop.py                 one process
torchrun --nproc-per-node 2 examples/foreign_loop.py
python examples/foreign_loop.py train.num_steps=60000     long enough to kill it by hand
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot import Guard, load_config

BATCH = 32


class Points:
    """A DataPort: each batch is a function of its first sample, and of the rank."""

    def __init__(self, rank: int) -> None:
        self.next_sample, self.rank = 0, rank

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(1_000_003 * self.rank + self.next_sample))
        self.next_sample += BATCH
        return x, (x.sum(1) > 0).long()

    def cursor(self) -> Mapping[str, Any]:
        return {"next_sample": self.next_sample}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config = load_config(Path(__file__).with_suffix(".toml"), sys.argv[1:]).config
    torch.manual_seed(config.run.seed)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 2))
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr)
    points = Points(rank)
    with Guard(config, model=model, optimizer=optimizer, data=points, gradient_divisor=world_size) as guard:
        guard.restore()
        while guard.begin():
            x, y = next(points)
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            if guard.judge(loss, BATCH, lr=config.optimizer.lr).proceeds:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(guard.clip_scale)  # the mean over samples, clipped
                optimizer.step()
                guard.applied()
            optimizer.zero_grad()
            guard.finish()
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
