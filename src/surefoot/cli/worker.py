"""What a rank runs: forked by the nursery, or started by torchrun or Slurm through `surefoot train`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from surefoot.config import load_config
from surefoot.coordinate.lock import RunLock
from surefoot.core.errors import SurefootError
from surefoot.core.records import StepReport
from surefoot.core.sections import ParallelSection, RunConfig
from surefoot.core.strict_json import dumps, loads
from surefoot.core.typed_json import record_from_json
from surefoot.core.units import show_count
from surefoot.drill.strike import strike
from surefoot.guard.testifying import testify_to_agent
from surefoot.launch.logs import rank_paths
from surefoot.launch.rendezvous import PARALLEL
from surefoot.tensors.flight import evidence_path, keep_evidence_at
from surefoot.tensors.heap import keep_freed_pages
from surefoot.tensors.memory_snapshot import leave_memory_snapshot
from surefoot.tensors.world import told_apart
from surefoot.train.loop import open_run
from surefoot.train.sample import text_sample
from surefoot.train.step import Parts, train_step

NUM_SAMPLE_TOKENS = 60
_ROOM_BYTES = 4096  # a block of common file systems; an error is a few lines

_kept_until_exit: list[Parts] = []
"""DDP's reducer must not be freed while the process lives: see tensors.process_group. The process ends by os._exit."""


def main() -> None:
    """Entry of a forked rank."""
    as_rank(lambda run_dir: train_here(with_layout(load_config(run_dir / "config.toml").config, os.environ)))


def with_layout(config: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """`config` in the layout of this generation, where the number of nodes gives it another one than [parallel] says."""
    layout = environment.get(PARALLEL)
    return replace(config, parallel=record_from_json(ParallelSection, loads(layout))) if layout else config


def as_rank(work: Callable[[Path], object]) -> None:
    """Do the work of a forked rank, given the run folder. Leaves its error beside its log, for the agent, and ends with the exit code of
    that error."""
    set_up_process()
    run_dir = Path(os.environ["SUREFOOT_RUN_DIR"])
    generation, rank = int(os.environ["SUREFOOT_GENERATION"]), int(os.environ["RANK"])
    keep_evidence_at(evidence_path(run_dir, generation=generation, rank=rank))
    testify_to_agent()
    path = rank_paths(run_dir, generation, rank)[2]
    room = _keep_room(path)
    try:
        work(run_dir)
    except SurefootError as error:
        _leave_error(error, path, room=room)
        _to_log(f"{error}\n")
        raise SystemExit(error.exit_code) from error
    except torch.OutOfMemoryError:
        leave_memory_snapshot(path.with_name(f"rank_{rank}.memory.json"))
        raise
    finally:
        with suppress(OSError):
            room.unlink(missing_ok=True)


def train_here(config: RunConfig, *, on_rank_0: Callable[[], RunLock] | None = None) -> None:
    """Collective over the world. Train to the end in this process; SystemExit when the group leaves, PeerLost when a peer is gone.

    `on_rank_0` runs there before anything is read, while the others wait: it opens the run folder where no agent did.
    """
    try:
        with open_run(config, on_rank_0=on_rank_0) as (parts, guard):
            _kept_until_exit.append(parts)
            guard.restore()
            last: StepReport | None = None
            while guard.begin():
                strike(config, parts.world, step=guard.step)
                last = train_step(parts, guard)
            if guard.finished:
                _say_result(parts, last)
    except RuntimeError as error:
        raise told_apart("a reduction of gradients", error) from error


def set_up_process() -> None:
    """Once per rank, before the first tensor: what its owner decides and no library may."""
    set_up_logging()
    keep_freed_pages()


def set_up_logging() -> None:
    """Progress lines as they are on stdout; warnings and worse, with their origin, on stderr."""
    progress = logging.getLogger("surefoot.progress")
    to_console = logging.StreamHandler(sys.stdout)
    to_console.setFormatter(logging.Formatter("%(message)s"))
    progress.addHandler(to_console)
    progress.setLevel(logging.INFO)
    progress.propagate = False
    to_log = logging.StreamHandler(sys.stderr)
    to_log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(to_log)
    root.setLevel(logging.WARNING)


def _keep_room(path: Path) -> Path:
    """A block of the disk for the last words to `path`: what ends a run may be that there is no other one left."""
    room = path.with_suffix(".room")
    with suppress(OSError):
        room.write_bytes(bytes(_ROOM_BYTES))
    return room


def _leave_error(error: SurefootError, path: Path, *, room: Path) -> None:
    """For the agent, which says it in these words; written into the room that was kept for them. Without one the exit code must do."""
    try:
        with room.open("r+b") as file:
            file.write(dumps(error.as_json()).encode())
            file.truncate()
        room.rename(path)
    except OSError as problem:
        _to_log(f"{path}: {problem}\n")


def _to_log(text: str) -> None:
    """The log lies on the disk that is full: the exit code must not become that of this write."""
    with suppress(OSError):
        sys.stderr.write(text)


def _say_result(parts: Parts, last: StepReport | None) -> None:
    sample = text_sample(parts, num_tokens=NUM_SAMPLE_TOKENS)  # collective under sharding, so every rank computes it
    if not parts.world.leads:
        return
    say = logging.getLogger("surefoot.progress").info
    say("")
    if last is not None and last.val_loss is not None:
        say(
            "trained on %s tokens: held-out loss %.4f nats per token, %.3f bits per byte",
            show_count(last.tokens),
            last.val_loss,
            last.bits_per_byte,
        )
    say("a sample of what it writes:\n%s", "\n".join(f"  | {line}" for line in sample.splitlines()))
    say("")
