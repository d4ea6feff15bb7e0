"""Whether a folder is the folder of a run: asked by every verb that only reads one, so that a wrong path is never an empty answer."""

from __future__ import annotations

from pathlib import Path

from surefoot.core.errors import ConfigError
from surefoot.observe.ledger import LEDGER_NAME
from surefoot.observe.live import read_lock

CONFIG_NAME = "config.toml"
CHECKPOINTS_NAME = "checkpoints"


def is_run(folder: Path) -> bool:
    """Whether it has a ledger, a config or checkpoints: what a damaged run still has one of. One that is being made has its lock first."""
    made = (folder / LEDGER_NAME).is_file() or (folder / CONFIG_NAME).is_file() or (folder / CHECKPOINTS_NAME).is_dir()
    return made or read_lock(folder) is not None


def require_run(folder: Path) -> None:
    """Raises ConfigError when `folder` does not exist, or is the folder of something else."""
    hint = "give the folder that `surefoot train` printed, as in runs/quickstart"
    if not folder.is_dir():
        raise ConfigError("no such run folder", where=str(folder), hint=hint)
    if not is_run(folder):
        raise ConfigError(f"not a run: it has no {LEDGER_NAME}, {CONFIG_NAME} or {CHECKPOINTS_NAME}/", where=str(folder), hint=hint)
