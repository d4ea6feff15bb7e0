"""The config that a run folder keeps: every value, where it came from, no absolute path, and the same RunConfig when loaded again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from surefoot.core.config_paths import relative_path
from surefoot.core.sections import RunConfig

_COMMENT_COLUMN = 44
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def config_text(config: RunConfig, *, folder: Path, origins: Mapping[str, str] | None = None, run_dir: str | None = None) -> str:
    """`config` as a TOML that means the same when it stands in `folder`. `run_dir` replaces `run.dir`.

    `origins` (setting -> where its value came from) become comments; without them there are none.
    """
    return _text(config, folder=folder, origins=origins or {}, run_dir=run_dir, only_told=False)


def told_text(config: RunConfig, told: Mapping[str, str], *, folder: Path) -> str:
    """Only the settings of `told`, each with what is told of it as a comment, if anything: for a person to read and to go on writing."""
    return _text(config, folder=folder, origins=told, run_dir=None, only_told=True)


def _text(config: RunConfig, *, folder: Path, origins: Mapping[str, str], run_dir: str | None, only_told: bool) -> str:
    lines: list[str] = []
    for item in fields(config):
        section: Any = getattr(config, item.name)
        if isinstance(section, tuple):
            lines += _table_lines(section, item.name, folder=folder, origins=origins, only_told=only_told)
            continue
        written = list(_section_lines(section, item.name, folder=folder, origins=origins, run_dir=run_dir, only_told=only_told))
        if written or (fields(section) and not only_told):
            lines += ["", f"[{item.name}]", *written]
    return "\n".join(lines[1:]) + "\n"


def _section_lines(
    section: Any, path: str, *, folder: Path, origins: Mapping[str, str], run_dir: str | None, only_told: bool
) -> Iterator[str]:
    tables: list[str] = []
    for item in fields(section):
        value, place = getattr(section, item.name), f"{path}.{item.name}"
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            tables += _table_lines(value, place, folder=folder, origins=origins, only_told=only_told)
            continue
        if only_told and place not in origins:
            continue
        shown = run_dir if place == "run.dir" and run_dir is not None else _shown(value, item, folder=folder)
        text = f"{item.name} = {toml_value(shown)}"
        yield f"{f'{text} ':<{_COMMENT_COLUMN}}# {origins[place]}" if origins.get(place) else text
    yield from tables


def _table_lines(tables: tuple[Any, ...], place: str, *, folder: Path, origins: Mapping[str, str], only_told: bool) -> Iterator[str]:
    for index, table in enumerate(tables):
        yield from ("", f"[[{place}]]")
        yield from _section_lines(table, f"{place}[{index}]", folder=folder, origins=origins, run_dir=None, only_told=only_told)


def _shown(value: Any, item: Field[Any], *, folder: Path) -> Any:
    """As it stands in the TOML: pairs as a table, paths as seen from `folder`."""
    if item.metadata["is_table"]:
        return dict(value)
    if not item.metadata["is_path"]:
        return value
    return relative_path(value, folder=folder) if isinstance(value, str) else tuple(relative_path(path, folder=folder) for path in value)


def toml_value(value: Any) -> str:
    """A value of a setting as TOML. JSON's strings are TOML's basic strings but for DEL, which TOML wants escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        pairs = (f"{name if _BARE_KEY.fullmatch(name) else toml_value(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)
