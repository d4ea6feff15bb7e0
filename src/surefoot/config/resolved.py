"""The config that a run folder keeps: every value, where it came from, no absolute path, and the same RunConfig when loaded again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomlkit

from surefoot.config.load import LoadedConfig
from surefoot.config.paths import relative_path
from surefoot.config.schema import Setting, sections, settings_of

_COMMENT_COLUMN = 44


def resolved_toml(loaded: LoadedConfig, run_dir: Path | str) -> str:
    """`<run>/config.toml`: all values with their origins, paths relative to `run_dir`, and `run.dir = "."`."""
    head = f"# All settings of this run as resolved from {loaded.path.name}. Behind each: where it came from.\n"
    return head + render(loaded, folder=Path(run_dir), run_dir=".")


def render(loaded: LoadedConfig, *, folder: Path, run_dir: str | None = None) -> str:
    """All settings as a TOML that means the same when it stands in `folder`. `run_dir` replaces `run.dir`."""
    lines: list[str] = []
    for name, section in sections().items():
        if settings_of(section):
            lines += ["", f"[{name}]"]
            lines += _section_lines(getattr(loaded.config, name), name, loaded=loaded, folder=folder, run_dir=run_dir)
    return "\n".join(lines[1:]) + "\n"


def _section_lines(section: object, path: str, *, loaded: LoadedConfig, folder: Path, run_dir: str | None) -> Iterator[str]:
    tables: list[str] = []
    for setting in settings_of(type(section)).values():
        value = getattr(section, setting.key)
        place = f"{path}.{setting.key}"
        if setting.item_section and value:
            for index, item in enumerate(value):
                tables += ["", f"[[{place}]]"]
                tables += _section_lines(item, f"{place}[{index}]", loaded=loaded, folder=folder, run_dir=None)
            continue
        text = f"{setting.key} = {_toml_value(_relative(value, setting, folder=folder))}"
        if place == "run.dir" and run_dir is not None:
            text = f'dir = "{run_dir}"'
        yield f"{text:<{_COMMENT_COLUMN}}# {loaded.origins[place]}"
    yield from tables


def _relative(value: Any, setting: Setting, *, folder: Path) -> Any:
    if not setting.is_path:
        return value
    return relative_path(value, folder=folder) if isinstance(value, str) else [relative_path(item, folder=folder) for item in value]


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        value = [list(item) if isinstance(item, tuple) else item for item in value]
    return str(tomlkit.item(value).as_string())
