"""The config that a run folder keeps, with the origin of every value."""

from __future__ import annotations

from pathlib import Path

from surefoot.config.load import LoadedConfig
from surefoot.core.config_text import config_text


def resolved_toml(loaded: LoadedConfig, run_dir: Path | str) -> str:
    """`<run>/config.toml`: all values with their origins, paths relative to `run_dir`, and `run.dir = "."`."""
    head = f"# All settings of this run as resolved from {loaded.path.name}. Behind each: where it came from.\n"
    return head + config_text(loaded.config, folder=Path(run_dir), origins=loaded.origins, run_dir=".")
