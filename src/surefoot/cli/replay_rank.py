"""What a rank of a replay runs."""

from __future__ import annotations

import os
from pathlib import Path

from surefoot.cli.replay_folder import TASK_NAME, seen_path
from surefoot.cli.worker import as_rank
from surefoot.config import load_config
from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.guard.script import task_from_json
from surefoot.tensors.world import told_apart
from surefoot.train.replaying import replay
from surefoot.train.step import Parts

_kept_until_exit: list[Parts] = []
"""As in a rank that trains."""


def main() -> None:
    """Entry of a forked rank."""
    as_rank(_replay)


def _replay(run_dir: Path) -> None:
    task = task_from_json(strict_json.loads((run_dir / TASK_NAME).read_bytes()))
    try:
        parts, seen = replay(load_config(run_dir / "config.toml").config, task)
    except RuntimeError as error:
        raise told_apart("a reduction of gradients", error) from error
    _kept_until_exit.append(parts)
    write_atomic(seen_path(run_dir, rank=int(os.environ["RANK"])), strict_json.dumps(seen.as_json()))
