"""The two things a person writes: a TOML file and `section.key=value` overrides, read into one list of given settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_origin

import tomlkit
from tomlkit.exceptions import ParseError, TOMLKitError

from surefoot.config.key_lines import key_lines, line_of, second_place
from surefoot.config.names import explain_unknown_key, explain_unknown_section
from surefoot.config.problems import Problem
from surefoot.config.schema import describe_type, sections, settings_of, table_lists
from surefoot.core.errors import ConfigError
from surefoot.core.tiers import without_credentials

RETIRED: Mapping[str, str] = {"monitor.max_skips_in_a_row": "heal.breaker_in_a_row is what pauses a run that skips on and on"}
"""Settings of earlier releases, which stand in the folders of their runs, and what has taken their place."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value that a person wrote. `origin` goes into the resolved config (no folder in it), `where` into error messages."""

    value: Any
    origin: str
    where: str


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed TOML with the place of every key. `shown_as` is the path as the caller gave it."""

    path: Path
    shown_as: str
    text: str
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def where(self, path: str) -> str:
        line = line_of(path, lines=self.lines)
        return f"{self.shown_as}:{line}" if line else self.shown_as

    def origin(self, path: str) -> str:
        line = line_of(path, lines=self.lines)
        return f"{self.path.name}:{line}" if line else self.path.name


def read_document(path: Path) -> Document:
    """Read and parse the TOML at `path`, or the `config.toml` of a run folder. Raises ConfigError with the line of a syntax error."""
    file = path / "config.toml" if path.is_dir() else path
    shown_as = str(file)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        hint = "it is no run folder" if path.is_dir() else "check the path, or write a starter config with `surefoot init`"
        raise ConfigError("there is no such file", where=shown_as, hint=hint) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError("the file is not UTF-8 text", where=f"{shown_as}:{line}", hint="save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=shown_as) from None
    try:
        values = tomlkit.parse(text).unwrap()
    except ParseError as error:
        what = str(error).removesuffix(f" at line {error.line} col {error.col}")
        raise ConfigError(f"not valid TOML: {what} (column {error.col})", where=f"{shown_as}:{error.line}", hint=_SYNTAX) from None
    except (TOMLKitError, ValueError) as error:
        again = second_place(text)
        where = f"{shown_as}:{again[1]}" if again else shown_as
        raise ConfigError(f"not valid TOML: {error}", where=where, hint="name each key once" if again else _SYNTAX) from None
    return Document(path=file.absolute(), shown_as=shown_as, text=text, values=values, lines=key_lines(text))


def given_by_file(document: Document, problems: list[Problem]) -> dict[str, dict[str, Given]]:
    """The settings of the file per section. Unknown sections and keys become problems."""
    given: dict[str, dict[str, Given]] = {}
    for name, content in document.values.items():
        if name in table_lists():
            continue
        if name not in sections():
            what, hint = explain_unknown_section(name)
            problems.append(Problem(document.where(name), what, hint))
        elif not isinstance(content, dict):
            what = f"{name} is a section, got {'a list of tables' if isinstance(content, list) else show(content)}"
            problems.append(Problem(document.where(name), what, f"write [{name}]"))
        else:
            given[name] = {}
            for key, value in content.items():
                path = f"{name}.{key}"
                if key in settings_of(sections()[name]):
                    given[name][key] = Given(value, document.origin(path), document.where(path))
                elif path not in RETIRED:
                    what, hint = explain_unknown_key(name, key)
                    problems.append(Problem(document.where(path), what, hint))
    return given


def retired_in(document: Document) -> list[str]:
    """A sentence for each setting of the file that only an earlier release had."""
    tables = {name: content for name, content in document.values.items() if isinstance(content, dict)}
    paths = [f"{name}.{key}" for name, content in tables.items() for key in content]
    return [f"{path} has no effect any more: {RETIRED[path]}" for path in paths if path in RETIRED]


def lists_given(document: Document, overrides: Sequence[str]) -> dict[str, Given]:
    """The arrays of tables at the top level, `[[stage]]`: those of the file, or `stage=[...]` whole in their place."""
    given = {
        name: Given(content, document.origin(name), document.where(name))
        for name, content in document.values.items()
        if name in table_lists()
    }
    for text in overrides:
        name, _, raw = text.partition("=")
        if name.strip() in table_lists():
            given[name.strip()] = Given(_override_value(raw.strip(), wants_text=False), "override", f"override {text}")
    return given


def given_by_overrides(overrides: Sequence[str], problems: list[Problem]) -> dict[str, dict[str, Given]]:
    """The settings of `section.key=value` texts per section; a later one wins."""
    given: dict[str, dict[str, Given]] = {}
    for text in overrides:
        where = f"override {without_credentials(text)}"
        name, separator, raw = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not separator:
            problems.append(Problem(where, "an override has no value", "write section.key=value, such as train.num_steps=60"))
        elif name.strip() in table_lists():
            continue
        elif (listed := section.partition("[")[0]) in table_lists():
            problems.append(Problem(where, f"[[{listed}]] is overridden as a whole", f"write {listed}=[{{ ... }}, ...] with all of them"))
        elif section not in sections():
            what, hint = explain_unknown_section(section)
            problems.append(Problem(where, what, hint))
        elif not dot or key not in settings_of(sections()[section]):
            what, hint = explain_unknown_key(section, key)
            problems.append(Problem(where, what, hint))
        else:
            value = _override_value(raw.strip(), wants_text=_wants_text(section, key))
            given.setdefault(section, {})[key] = Given(value, "override", where)
    return given


def show(value: object) -> str:
    """A value as a person would find it in their file, cut to a readable length."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update(value)
        text = table.as_string()
    elif isinstance(value, str | bool | int | float | list):
        text = tomlkit.item(value).as_string()
    else:
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SYNTAX = "a line reads key = value, strings stand in quotes"


def _wants_text(section: str, key: str) -> bool:
    kind = settings_of(sections()[section])[key].type
    if get_origin(kind) is Union:  # a number or a word: a bare word is one anyway
        return False
    words = describe_type(kind)
    return words == "a string" or '"' in words


def _override_value(raw: str, *, wants_text: bool) -> Any:
    """`raw` as a TOML value; a bare word is a string, and where a string is wanted everything that is not quoted is one."""
    try:
        value = tomlkit.value(raw).unwrap()
    except (TOMLKitError, ValueError):
        return raw
    return raw if wants_text and not isinstance(value, str) else value
