"""Faults that a rank commits itself, in its training thread, because a drill's config says so. In the ledger before they are done."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.sections import RunConfig
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from surefoot.observe.lineage import fold_counters
from surefoot.tensors.world import World

_ODD_LENGTH = 7  # elements; no reduction of the loop has so few


def strike(config: RunConfig, world: World, *, step: int) -> None:
    """Local, and that is the fault. Do what `[drill]` asks of this rank after `step` finished steps; nothing, as a rule."""
    drill = config.drill
    if drill.fault == "none" or (world.rank, step) != (drill.rank, drill.step):
        return
    generation = int(os.environ.get("SUREFOOT_GENERATION", "1"))
    if drill.generations and generation > drill.generations:
        return
    _note(Path(config.run.dir), drill.fault, rank=world.rank, step=step, generation=generation)
    if drill.fault == "exception":
        raise ValueError(f"a drill: rank {world.rank} fails before step {step + 1}")
    if drill.fault == "mismatched-collective":
        dist.all_reduce(torch.zeros(_ODD_LENGTH, device=world.device), group=world.loop_group)
    while drill.fault == "busy-loop":
        pass


def _note(run_dir: Path, fault: str, *, rank: int, step: int, generation: int) -> None:
    ledger = Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by=f"rank{rank}")
    attempt = fold_counters(read_ledger(ledger.path)).attempt
    fields = {"fault": fault, "ranks": [rank], "pid": os.getpid(), "mono_s": time.monotonic()}
    ledger.append(Event.DRILL_INJECTED, generation=generation, attempt=attempt, step=step, rule="drill", reason=fault, fields=fields)
