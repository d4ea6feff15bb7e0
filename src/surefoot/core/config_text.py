"""The config that a run folder keeps: every value, where it came from, no absolute path, and the same RunConfig when loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from surefoot.core.config_paths import relative_path
from surefoot.core.sections import RunConfig

_COMMENT_COLUMN = 44


def config_text(config: RunConfig, *, folder: Path, origins: Mapping[str, str] | None = None, run_dir: str | None = None) -> str:
    """`config` as a TOML that means the same when it stands in `folder`. `run_dir` replaces `run.dir`.

    `origins` (setting -> where its value came from) become comments; without them there are none.
    """
    lines: list[str] = []
    for item in fields(config):
        section: Any = getattr(config, item.name)
        if fields(section):
            lines += ["", f"[{item.name}]"]
            lines += _section_lines(section, item.name, folder=folder, origins=origins or {}, run_dir=run_dir)
    return "\n".join(lines[1:]) + "\n"


def _section_lines(section: Any, path: str, *, folder: Path, origins: Mapping[str, str], run_dir: str | None) -> Iterator[str]:
    tables: list[str] = []
    for item in fields(section):
        value, place = getattr(section, item.name), f"{path}.{item.name}"
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            for index, table in enumerate(value):
                tables += ["", f"[[{place}]]"]
                tables += _section_lines(table, f"{place}[{index}]", folder=folder, origins=origins, run_dir=None)
            continue
        shown = run_dir if place == "run.dir" and run_dir is not None else _relative(value, item, folder=folder)
        text = f"{item.name} = {toml_value(shown)}"
        yield f"{text:<{_COMMENT_COLUMN}}# {origins[place]}" if place in origins else text
    yield from tables


def _relative(value: Any, item: Field[Any], *, folder: Path) -> Any:
    if not item.metadata["is_path"]:
        return value
    return relative_path(value, folder=folder) if isinstance(value, str) else tuple(relative_path(path, folder=folder) for path in value)


def toml_value(value: Any) -> str:
    """A value of a setting as TOML. JSON's strings are TOML's basic strings but for DEL, which TOML wants escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)
