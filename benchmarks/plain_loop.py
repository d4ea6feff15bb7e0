"""The loop that people write when they have no surefoot: plain eager PyTorch, the yardstick of benchmarks/overhead.py.

Same model, same initial weights, same batches (exported beforehand), AdamW, clip_grad_norm_, DistributedDataParallel with its defaults,
torch.save every `--save-every` steps. Started like torchrun would start it: one process a rank, RANK and WORLD_SIZE in the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.config import load_config
from surefoot.model.build import build_model, materialise
from surefoot.train.optimizers import build_optimizer, set_learning_rate
from surefoot.train.schedule import learning_rate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--batches", type=Path, required=True, help="made by overhead.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(options.threads)
    config = load_config(options.config).config
    batches = torch.load(options.batches, weights_only=True)
    model = build_model(config.model, int(batches["vocab_size"]), seed=config.run.seed)
    materialise(model, seed=config.run.seed, device=torch.device("cpu"))
    optimizer = build_optimizer(model, config.optimizer)
    forward: nn.Module = model
    if world_size > 1:
        dist.init_process_group("gloo")
        forward = DistributedDataParallel(model)

    steps = batches[f"rank_{rank}"]
    rows = []
    for step, atoms in enumerate(steps, start=1):
        set_learning_rate(optimizer, learning_rate(step, config.schedule, num_steps=config.train.num_steps, peak=config.optimizer.lr))
        loss_sum = 0.0
        for index, atom in enumerate(atoms):
            last = index + 1 == len(atoms)
            with forward.no_sync() if isinstance(forward, DistributedDataParallel) and not last else torch.enable_grad():
                logits = forward(atom["tokens"], atom["positions"], atom["doc_ids"])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), atom["labels"].flatten(), ignore_index=-100, reduction="sum")
                (loss * world_size / batches["live_tokens"][step - 1]).backward()
            loss_sum += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % options.save_every == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, options.out / "state.pt")
        rows.append({"step": step, "loss_sum": loss_sum, "mono_s": time.monotonic(), "cpu_s": time.process_time()})
    (options.out / f"rank_{rank}.json").write_text(json.dumps(rows))
    if world_size > 1:
        dist.barrier()
        os._exit(0)  # freeing DDP's reducer deadlocks now and then in torch 2.13; what is timed lies behind us


if __name__ == "__main__":
    main()
